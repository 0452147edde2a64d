"""The logs of a run: progress.csv and TensorBoard events, begun, or gone on with after a stop.

Where a run goes on from a checkpoint, what was logged after that checkpoint is taken out: those steps come again.
"""

import csv
import io
from pathlib import Path

from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat, configure
from torch.utils.tensorboard import SummaryWriter

STEPS = "time/total_timesteps"


def open_logs(run: Path, after: int | None = None) -> Logger:
    """SB3's logger into the folder `run`, silent; `after` the steps of a checkpoint, it goes on with what is there."""
    if after is None:
        return configure(str(run), ["csv", "tensorboard"])
    return Logger(str(run), [_Csv(run / "progress.csv", after), _TensorBoard(run, after)])


class _Csv(CSVOutputFormat):
    """Goes on with a table, where SB3's begins anew."""

    def __init__(self, path: Path, after: int) -> None:
        rows = _rows(path, after)
        draft = path.with_name(f".{path.name}.tmp")
        table = io.StringIO(newline="")
        csv.writer(table, lineterminator="\n").writerows(rows)
        draft.write_text(table.getvalue(), encoding="utf-8")
        draft.replace(path)
        self.file = path.open("r+", encoding="utf-8")
        self.file.seek(0, io.SEEK_END)
        self.keys = rows[0] if rows else []
        self.separator, self.quotechar = ",", '"'


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
