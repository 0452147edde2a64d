"""What acts: policies for control (`control`)."""
