"""Writing a run's checkpoints, whole or in shards, at once or in the background."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save as to_bytes
from torch import Tensor

from twoaxis.errors import RunError
from twoaxis.train.checkpoint import (
    PREFIX,
    cannot_save,
    commit,
    folder_of,
    problem,
    prune,
    save_checkpoint,
)
from twoaxis.train.processes import first_tells
from twoaxis.train.state import Part, facts_of, parts_of

if TYPE_CHECKING:
    from twoaxis.train.session import Session


class Saver:
    """Saves a session in a folder of checkpoints. `finish` before the folder is read, or the process ends."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.folder, self.cfg = session, folder, session.cfg
        self.writing: tuple[int, int, Future[Any]] | None = (
            None  # step, bytes of this process, in the background
        )
        self.group: dist.ProcessGroup | None = None
        if self.cfg.checkpoint_format == "sharded" and not session.team.alone:
            self.group = session.team.files_group()

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on. RunError, on every process, if it fails."""
        session, step = self.session, self.session.progress.step
        self.finish()
        parts = parts_of(session)
        broken = [
            n for n, p in parts.items() if n.startswith("model/") and not torch.isfinite(p.tensor).all()
        ]
        if session.team.anyone(bool(broken)):
            which = broken[0].removeprefix("model/") if broken else "a weight of another process"
            raise RunError(f"step {step}: {which} is not finite")
        if session.team.anyone(session.team.first and problem(folder_of(self.folder, step)) is None):
            return  # it is there
        if self.cfg.checkpoint_format == "file":
            self._as_file(parts)
        else:
            self._as_shards(parts)

    def _plain(self) -> dict[str, bytes]:
        model = self.session.cfg.model.to_json().encode()
        return {"config.json": model, "state.json": json.dumps(facts_of(self.session)).encode()}

    def _as_file(self, parts: dict[str, Part]) -> None:
        """Whole tensors, brought together on the first process; the others wait for what becomes of them."""
        whole = self.session.team.gathered(parts) or {}
        first_tells(lambda: self._write(whole), self.session.device)

    def _write(self, whole: dict[str, Tensor]) -> None:
        """Write whole tensors, here."""
        weights = {n.removeprefix("model/"): t for n, t in whole.items() if n.startswith("model/")}
        files = {
            "model.safetensors": _bytes(weights),
            "state.safetensors": _bytes({n: t for n, t in whole.items() if not n.startswith("model/")}),
            **self._plain(),
        }
        cfg = self.cfg
        save_checkpoint(self.folder, self.session.progress.step, files, cfg.keep_checkpoints, cfg.keep_every)

    def _as_shards(self, parts: dict[str, Part]) -> None:
        """Each process's pieces, through torch.distributed.checkpoint."""
        import torch.distributed.checkpoint as dcp

        from twoaxis.train.dcp_save import SavePieces, ShardWriter, pieces_of, quiet

        step, cfg = self.session.progress.step, self.cfg
        target = folder_of(self.folder, step)
        temporary = self.folder / f".{target.name}.shards"

        def complete(marks: dict[str, Any]) -> None:
            commit(temporary, target, marks)
            prune(self.folder, cfg.keep_checkpoints, cfg.keep_every)

        quiet()
        placed = {n: (p.tensor, p.place) for n, p in parts.items()}
        state, planner = pieces_of(placed), SavePieces(placed)
        given: dict[str, Any] = {"storage_writer": ShardWriter(temporary, self._plain(), complete)}
        given |= {"planner": planner, "process_group": self.group, "no_dist": self.group is None}
        needed = sum(t.numel() * t.element_size() for t in state.values())
        if cfg.checkpoint_async:
            self.writing = step, needed, cast("Future[Any]", dcp.async_save(state, **given))
            return
        try:
            dcp.save(state, **given)
        except BaseException as error:
            self._failed(step, needed, error)

    def finish(self) -> None:
        """Wait for what is being written. RunError if it failed."""
        if self.writing is not None:
            step, needed, future = self.writing
            self.writing = None
            try:
                future.result()
            except BaseException as error:
                self._failed(step, needed, error)

    def _failed(self, step: int, needed: int, error: BaseException) -> None:
        """Clear what was written; RunError with what the disk said, on whichever process; other errors as they are."""
        if self.session.team.first:
            for path in self.folder.glob(f".{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
        for cause, _ in getattr(error, "failures", {}).values():
            if isinstance(cause, OSError):
                raise RunError(cannot_save(self.folder, step, needed, cause)) from None
            raise cause from None
        raise error


def _bytes(tensors: dict[str, Tensor]) -> bytes:
    return to_bytes({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"format": "pt"})
