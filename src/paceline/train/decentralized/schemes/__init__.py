"""The schemes by name, each imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.train.decentralized.schemes.scheme import Scheme

SCHEMES = {
    "adpsgd": "adpsgd:ADPSGD",
    "allreduce": "allreduce:AllReduce",
    "diloco": "local_sgd:DiLoCo",
    "eager": "eager:Eager",
    "local-sgd": "local_sgd:LocalSGD",
    "ps": "parameter_server:ParameterServer",
    "ps-async": "parameter_server:AsyncParameterServer",
    "ripples": "ripples:Ripples",
    "sgp": "sgp:SGP",
    "static": "static:Static",
    "wagma": "wagma:WAGMA",
}


def find_scheme(name: str) -> type[Scheme]:
    """Return a scheme's class."""
    if name not in SCHEMES:
        raise UsageError(f"there is no scheme {name!r}: choose one of {', '.join(SCHEMES)}")
    module, _, what = SCHEMES[name].partition(":")
    found: type[Scheme] = getattr(import_module(f"{__name__}.{module}"), what)
    return found
