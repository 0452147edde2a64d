"""Groups: exact snapshots of envs (`snapshot`) and a vec env whose columns continue from one another (`vec_env`)."""
