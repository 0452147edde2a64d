"""Both ways to step many MjData against a loop of `mj_step`: bit-equal, in part too, and after others wrote to them."""

from __future__ import annotations

import importlib.util
from typing import Any

import mujoco
import numpy as np
import pytest

from grpo_rl.groups.physics import NativePhysics, ThreadPhysics, make_physics

XML = """
<mujoco>
  <option integrator="RK4"/>
  <worldbody>
    <geom type="plane" size="2 2 .1"/>
    <body name="ball" pos="0 0 .2"><freejoint/><geom size=".1" mass="1"/></body>
    <body name="arm" pos="1 0 .5">
      <joint name="hinge" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 .3 0 0" size=".02"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge" gear="2"/></actuator>
</mujoco>
"""  # a ball that falls on a plane, and an arm
NAMES = ("qpos", "qvel", "xpos")
KINDS = ["threads", "native"] if importlib.util.find_spec("mujoco.batch") else ["threads"]


def simulations(kind: str, n: int = 5, n_threads: int = 2) -> tuple[Any, list[Any], list[Any], Any]:
    """The model, n MjData in different states, the same again, and the physics of the first ones."""
    model = mujoco.MjModel.from_xml_string(XML)
    datas, others = ([mujoco.MjData(model) for _ in range(n)] for _ in range(2))
    for group in (datas, others):
        for i, data in enumerate(group):
            data.qpos[2] = 0.1 + 0.05 * i
            mujoco.mj_forward(model, data)
    if kind == "threads":
        return model, datas, others, ThreadPhysics(model, datas, 3, NAMES, False, n_threads)
    return model, datas, others, NativePhysics(model, datas, 3, NAMES, n_threads)


def loop(model: Any, datas: list[Any], columns: list[int], actions: np.ndarray) -> None:
    for column in columns:
        datas[column].ctrl[:] = actions[column]
        mujoco.mj_step(model, datas[column], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_to_a_loop(kind: str) -> None:
    model, datas, others, physics = simulations(kind)
    rng, some = np.random.default_rng(0), [1, 2, 4]
    for step in range(60):
        actions = rng.uniform(-1, 1, (5, 1)).astype(np.float32)
        columns = list(range(5)) if step % 3 else some
        physics.step(columns, actions)
        loop(model, others, columns, actions)
        for name, values in vars(physics.read(columns)).items():
            assert values.tobytes() == np.array([getattr(others[column], name) for column in columns]).tobytes()
        assert physics.read([0, 1, 2, 3, 4]).qpos.tobytes() == np.array([data.qpos for data in others]).tobytes()
    assert vars(physics.read(some, ("xpos",))).keys() == {"xpos"}
    assert any(data.ncon for data in others), "no ball has touched the plane"
    physics.settle([0, 3])
    for column in (0, 3):
        assert datas[column].time == others[column].time
        np.testing.assert_array_equal(datas[column].qacc_warmstart, others[column].qacc_warmstart)
        np.testing.assert_array_equal(datas[column].qfrc_constraint, others[column].qfrc_constraint)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_what_others_write(kind: str) -> None:
    model, datas, others, physics = simulations(kind)
    everyone, actions = list(range(5)), np.full((5, 1), 0.3)
    for _ in range(20):
        physics.step(everyone, actions)
        loop(model, others, everyone, actions)
    physics.settle([3])
    mujoco.mj_copyData(datas[0], model, datas[3])
    mujoco.mj_copyData(others[0], model, others[3])
    mujoco.mj_resetData(model, datas[1])
    mujoco.mj_resetData(model, others[1])
    physics.adopt([0, 1])
    physics.settle([1])  # it is the newest state: nothing overwrites it
    assert datas[1].time == 0
    for _ in range(20):
        physics.step(everyone, actions)
        loop(model, others, everyone, actions)
    np.testing.assert_array_equal(physics.read(everyone).qpos, [data.qpos for data in others])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_a_copy(kind: str) -> None:
    _, _, _, physics = simulations(kind)
    before = physics.read([0, 1, 2, 3, 4])
    kept = before.qpos.copy()
    physics.step([0, 1, 2, 3, 4], np.ones((5, 1)))
    np.testing.assert_array_equal(before.qpos, kept)
    assert (physics.read([0, 1, 2, 3, 4]).qpos != kept).any()


def test_contact_forces_need_pythons_threads() -> None:
    model, datas, _, _ = simulations("threads")
    physics = make_physics(model, datas, 3, ("cfrc_ext",), True, 2)
    assert type(physics) is ThreadPhysics
    for _ in range(40):
        physics.step([0, 1, 2, 3, 4], np.zeros((5, 1)))
    weight = physics.read([0]).cfrc_ext[0, 1, 5]  # the ball lies on the plane: 1 kg · 9.81 m/s²
    assert weight == pytest.approx(9.81, rel=0.05)
    expected = NativePhysics if "native" in KINDS else ThreadPhysics
    assert type(make_physics(model, datas, 3, NAMES, False, 2)) is expected
