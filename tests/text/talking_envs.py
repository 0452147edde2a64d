"""Envs with text spaces, one behaviour each."""

import gymnasium as gym

from grpo_rl.text import Unicode


class Echo(gym.Env):
    """Says a random letter, then repeats what it hears, `turns` times; the reward is the length of what it heard."""

    def __init__(self, turns=3, prefix=""):
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.turns, self.prefix = turns, prefix
        self.heard = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        self.heard.clear()
        letter = "abcdefgh"[self.np_random.integers(8)]
        return self.prefix + letter, {"user": letter}

    def step(self, action):
        self.turn += 1
        self.heard.append(str(action))
        return str(action), float(len(action)), self.turn == self.turns, False, {}


class Unseeded(Echo):
    """Starts differently each time, whatever the seed."""

    count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Unseeded.count += 1
        return "abcdefgh"[Unseeded.count % 8], {}


class Fragile(Echo):
    """Breaks when it hears "b"."""

    def step(self, action):
        if action == "b":
            raise OSError("connection lost")
        return super().step(action)


class Indifferent(Echo):
    """Its reward is no number when it hears "b"."""

    def step(self, action):
        *rest, terminated, truncated, info = super().step(action)
        return (rest[0], float("nan") if action == "b" else rest[1], terminated, truncated, info)
