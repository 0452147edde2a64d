"""How rollouts are sampled: step by step in vectorised envs (`steps`)."""
