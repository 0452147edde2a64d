"""A film of one episode, recorded in a process of its own: a graphics driver that crashes takes no run with it.

MuJoCo renders off screen through EGL or OSMesa, whichever works, or what MUJOCO_GL names; pygame needs no display.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from grpo_rl.lab.build import make_env, open_run, seen_by
from grpo_rl.mujoco_log import log_into

MAX_FRAMES = 400
WIDTH = 240
"""Of the film, in pixels; an episode longer than MAX_FRAMES frames is cut there."""

_PACKAGES = "apt-get install libegl1 libgl1-mesa-dri (or libosmesa6)"


def film(run: Path, gif: Path, trust: bool = False) -> str:
    """Records an episode of the run's agent, mode actions, into `gif`. Returns "", or why there is no film.

    `trust`: the agent's file may execute code.
    """
    chosen = os.environ.get("MUJOCO_GL")
    reason, mujoco = "", False
    for backend in [chosen] if chosen else offscreen_backends():
        result = subprocess.run(
            [sys.executable, "-m", __name__, str(run), str(gif), *["--trust"] * trust],
            env=os.environ | {"MUJOCO_GL": backend, "SDL_VIDEODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if result.returncode == 0:
            return ""
        reason = (result.stderr.strip().splitlines() or [f"the renderer ended with status {result.returncode}"])[-1]
        mujoco = "mujoco" in result.stderr.lower()
    if mujoco:
        return f"MuJoCo found no way to render off screen. On Debian or Ubuntu: {_PACKAGES}"
    return reason


def show(run: Path, trust: bool = False) -> None:
    """Plays episodes of the run's agent in a window, mode actions, until the window or the program is closed."""
    recipe, agent = open_run(run, trust)
    env, see = make_env(recipe.environment, render_mode="human"), seen_by(agent)
    obs, _ = env.reset()
    score = 0.0
    while True:
        action, _ = agent.predict(see(obs), deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(action)
        score += float(reward)
        if terminated or truncated:
            print(f"return {score:.1f}", flush=True)
            obs, _ = env.reset()
            score = 0.0


def has_display() -> bool:
    """Whether a window can be opened."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def offscreen_backends() -> list[str]:
    """Values of MUJOCO_GL to try, best first."""
    return ["egl", "osmesa"] if sys.platform == "linux" else ["glfw"]


def record(run: Path, gif: Path, trust: bool) -> None:
    """What the process does: plays an episode and writes the GIF at about its real speed."""
    recipe, agent = open_run(run, trust)
    log_into(run)
    env, see = make_env(recipe.environment, render_mode="rgb_array"), seen_by(agent)
    fps = float(env.metadata.get("render_fps") or 30)
    every = max(round(fps / 25), 1)  # a GIF shows at most 50 frames a second, browsers fewer
    frames: list[Image.Image] = []
    obs, _ = env.reset(seed=2_000_000 + recipe.training.seed)
    step, over = 0, False
    while not over and len(frames) < MAX_FRAMES:
        if step % every == 0:
            image = Image.fromarray(np.asarray(env.render(), dtype=np.uint8))
            height = round(image.height * WIDTH / image.width)
            frames.append(image.resize((WIDTH, height), Image.Resampling.BILINEAR).quantize(64))
        action, _ = agent.predict(see(obs), deterministic=True)
        obs, _, terminated, truncated, _ = env.step(action)
        over, step = terminated or truncated, step + 1
    env.close()
    frames[0].save(
        gif, save_all=True, append_images=frames[1:], duration=round(1000 * every / fps), loop=0, optimize=True
    )


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), "--trust" in sys.argv)
