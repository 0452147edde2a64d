"""Curricula: environments that start easy and become harder, by a schedule or by how often the agent succeeds.

`Curriculum` wraps one env and sets its difficulty before each reset, so that an episode has one difficulty from its
start to its end. A rule says which: a number, a schedule over env steps, or `AdaptiveDifficulty`. In a vectorised env
`CurriculumDriver` keeps one rule for all columns and moves it between rollouts. GRPO makes a driver itself;
`CurriculumCallback` makes one for SB3's own algorithms. Without a driver each wrapper follows its own steps.

A fork takes the episode's difficulty along, so the members of a group share one, and so does a root that is visited
again later; a fresh start takes the new one.
"""

from grpo_rl.curriculum.driver import CurriculumCallback, CurriculumDriver
from grpo_rl.curriculum.rules import AdaptiveDifficulty, full_difficulty, parse_difficulty
from grpo_rl.curriculum.wrapper import Curriculum, make_env
from grpo_rl.schedules import ConstantSchedule, LinearSchedule, PiecewiseSchedule

__all__ = [
    "AdaptiveDifficulty",
    "ConstantSchedule",
    "Curriculum",
    "CurriculumCallback",
    "CurriculumDriver",
    "LinearSchedule",
    "PiecewiseSchedule",
    "full_difficulty",
    "make_env",
    "parse_difficulty",
]
