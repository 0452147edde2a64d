"""The logs of a run: progress.csv and TensorBoard events, begun, or gone on with after a stop.

Where a run goes on from a checkpoint, what was logged after that checkpoint is taken out: those steps come again.
A log that cannot be written, on a full disk for instance, is said once and ends there; the training goes on.
"""

import contextlib
import csv
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import CSVOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from grpo_rl.errors import warn

STEPS = "time/total_timesteps"


def open_logs(run: Path, after: int | None = None, say: Callable[[str], None] = warn) -> Logger:
    """SB3's logger into the folder `run`, silent.

    Args:
        run: The folder.
        after: The steps of a checkpoint: it goes on with what is there.
        say: Takes a sentence when a log cannot be written.
    """
    if after is None:
        table: Callable[[], KVWriter] = lambda: CSVOutputFormat(str(run / "progress.csv"))  # noqa: E731
        events: Callable[[], KVWriter] = lambda: _quiet(TensorBoardOutputFormat(str(run)))  # noqa: E731
    else:
        table = lambda: _Csv(run / "progress.csv", after)  # noqa: E731
        events = lambda: _quiet(_TensorBoard(run, after))  # noqa: E731
    return Logger(str(run), [WhileItCan("progress.csv", table, say), WhileItCan("TensorBoard's events", events, say)])


class WhileItCan(KVWriter):
    """A writer of logs up to its first OSError, which is said; then it writes nothing more.

    Args:
        name: Of the log, for that sentence.
        make: Opens the writer.
        say: Takes the sentence.
    """

    def __init__(self, name: str, make: Callable[[], KVWriter], say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.writer: KVWriter | None = None
        try:
            self.writer = make()
        except OSError as error:
            self._end(error)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        if self.writer is not None:
            try:
                self.writer.write(key_values, key_excluded, step)
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        writer, self.writer = self.writer, None
        self.say(f"{self.name} cannot be written: {error.strerror or error}; the training goes on without that log")
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


class _Csv(CSVOutputFormat):
    """Goes on with a table, where SB3's begins anew."""

    def __init__(self, path: Path, after: int) -> None:
        rows = _rows(path, after)
        draft = path.with_name(f".{path.name}.tmp")
        table = io.StringIO(newline="")
        csv.writer(table, lineterminator="\n").writerows(rows)
        try:
            draft.write_text(table.getvalue(), encoding="utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self.file = path.open("r+", encoding="utf-8")
        self.file.seek(0, io.SEEK_END)
        self.keys = rows[0] if rows else []
        self.separator, self.quotechar = ",", '"'


def _quiet(writer: TensorBoardOutputFormat) -> TensorBoardOutputFormat:
    """Its thread prints no traceback: the error that ends it comes again at the next write, and is said there."""
    events = getattr(writer.writer.file_writer, "event_writer", None)
    worker = getattr(getattr(events, "_async_writer", None), "_worker", None)
    if isinstance(worker, threading.Thread):
        setattr(worker, "_invoke_excepthook", lambda thread: None)  # noqa: B010
    return writer


def _rows(path: Path, after: int) -> list[list[str]]:
    """The header and the whole rows up to `after` steps, the first of each; a stop may have cut the last one.

    A run that came to its end has a second row of its last step, for the last update. The checkpoint holds that, too.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="", errors="replace") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    if STEPS not in header:
        return []
    column = header.index(STEPS)
    whole = [row for row in rows if len(row) == len(header) and row[column].isdigit()]
    first = {int(row[column]): row for row in reversed(whole)}
    return [header, *(first[steps] for steps in sorted(first) if steps <= after)]


class _TensorBoard(TensorBoardOutputFormat):
    """Another file of events, which hides those of the others that lie beyond it."""

    def __init__(self, run: Path, after: int) -> None:
        self.writer = SummaryWriter(log_dir=str(run), purge_step=after + 1)
        self._is_closed = False
