"""One thread for torch and BLAS, in every test: the tests share the machine, and tiny nets are slower on more."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch as th

th.set_num_threads(1)
