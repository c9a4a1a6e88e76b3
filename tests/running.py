"""Runs reshard jobs in tests: in this process, without Ray, by the same DAG and driver."""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch

from cluster.inline import InlineExecution
from pipeline import nodes
from pipeline.discovery import discover
from pipeline.driver import execute
from pipeline.messages import Progress
from pipeline.options import Request

FIXTURES = Path(__file__).parent / "data" / "fixtures"


def reshard_here(source: object, target: object, **options: Any) -> dict[str, Any]:
    """Reshard as the command does, in this process."""
    request = Request(str(source), str(target), **{"keep_state": False, **options})
    with InlineExecution(nodes.FUNCTIONS) as execution:
        return execute(request, discover(request.source, request.checkpoint), execution, Progress())


class _Stub:
    """Stands for a class that is not installed (omegaconf, metaseq)."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ModuleNotFoundError:
            return type(name, (_Stub,), {})


_LENIENT = types.ModuleType("lenient_pickle")
_LENIENT.__dict__.update({name: getattr(pickle, name) for name in dir(pickle) if not name.startswith("__")})
_LENIENT.Unpickler = _Unpickler  # type: ignore[attr-defined]


def load(path: object) -> Any:
    """Load a file of ours or of a test fixture with plain torch, also where its classes are not installed."""
    return torch.load(str(path), weights_only=False, pickle_module=_LENIENT)
