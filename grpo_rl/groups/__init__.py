"""Groups of envs: vec envs whose columns continue from one another, in this process, in workers, or as one batch."""
