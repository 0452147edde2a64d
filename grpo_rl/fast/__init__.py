"""Sampling and updates without torch in the loop, for networks so small that torch's overhead is what they cost."""
