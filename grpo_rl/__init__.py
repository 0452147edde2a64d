"""Group Relative Policy Optimization for everything with a Gymnasium interface.

`from grpo_rl import GRPO` is all that most users need; names below are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "GRPO": "grpo_rl.grpo",
    "GroupVecEnv": "grpo_rl.groups.vec_env",
    "MujocoVecEnv": "grpo_rl.groups.mujoco",
    "make_group_env": "grpo_rl.groups.make",
    "make_vec": "grpo_rl.groups.mujoco",
    "probe_fork": "grpo_rl.forks.probe",
    "MlpPolicy": "grpo_rl.policies.control",
    "CnnPolicy": "grpo_rl.policies.control",
    "MultiInputPolicy": "grpo_rl.policies.control",
    "Curriculum": "grpo_rl.curriculum",
    "HealthMonitor": "grpo_rl.monitor",
    "LinearSchedule": "grpo_rl.schedules",
    "ConstantSchedule": "grpo_rl.schedules",
    "PiecewiseSchedule": "grpo_rl.schedules",
    "GRPOError": "grpo_rl.errors",
}

if TYPE_CHECKING:
    from grpo_rl.curriculum import Curriculum
    from grpo_rl.errors import GRPOError
    from grpo_rl.forks.probe import probe_fork
    from grpo_rl.groups.make import make_group_env
    from grpo_rl.groups.mujoco import MujocoVecEnv, make_vec
    from grpo_rl.groups.vec_env import GroupVecEnv
    from grpo_rl.grpo import GRPO
    from grpo_rl.monitor import HealthMonitor
    from grpo_rl.policies.control import CnnPolicy, MlpPolicy, MultiInputPolicy
    from grpo_rl.schedules import ConstantSchedule, LinearSchedule, PiecewiseSchedule

__all__ = [
    "GRPO",
    "CnnPolicy",
    "ConstantSchedule",
    "Curriculum",
    "GRPOError",
    "GroupVecEnv",
    "HealthMonitor",
    "LinearSchedule",
    "MlpPolicy",
    "MujocoVecEnv",
    "MultiInputPolicy",
    "PiecewiseSchedule",
    "__version__",
    "make_group_env",
    "make_vec",
    "probe_fork",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'grpo_rl' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
