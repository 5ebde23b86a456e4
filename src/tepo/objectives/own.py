"""An objective of the user's own, named `module:attribute` wherever a name of the table can stand."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from tepo.objectives.objective import Objective


def is_own(name: str) -> bool:
    """Whether a name means an attribute of a module and not a row of the table."""
    return ":" in name


def load_own(name: str, options: Mapping[str, Any], known: Collection[str]) -> tuple[Objective, dict[str, Any]]:
    """The objective that `module:attribute` stands for, and those of the options that are still to be applied to it.

    name: the module is looked for in the working directory first, then on sys.path; the attribute is an Objective, or
        something callable that returns one.
    options: a callable is given those that it has parameters for (all of them, if it takes **options).
    known: the options that can be applied to any objective afterwards.
    Raises ValueError naming the module and the attribute, what was found there and what is nearest to it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or ":" in attribute:
        raise ValueError(f"objective {name!r} is not of the form module:attribute (for example my_module:MY_OBJECTIVE)")
    module = _module(name, module_name)
    found = _attribute(name, module, attribute)
    if isinstance(found, Objective):
        return found, dict(options)
    if not callable(found):
        raise ValueError(
            f"objective {name}: {attribute} in {_place(module)} is of type {type(found).__name__}; wanted is an "
            f"Objective, or a function that returns one{_candidates(module)}"
        )
    parameters = _parameters(found)
    taken = dict(options) if parameters is None else {key: options[key] for key in options if key in parameters}
    for option in options:
        if option not in taken and option not in known:
            allowed = [*(parameters or ()), *known]
            raise ValueError(
                f"objective {name} has no option {option!r}{_nearest(option, allowed)}; options of its own: "
                f"{', '.join(parameters or ()) or 'none'}; options of every objective: {', '.join(known)}"
            )
    try:
        made = found(**taken)
    except Exception as error:  # whatever a user's function does wrong is told to the user
        given = f" given {', '.join(taken)}" if taken else ""
        raise ValueError(f"objective {name}: {attribute} in {_place(module)}{given} raises {_told(error)}") from error
    if not isinstance(made, Objective):
        raise ValueError(
            f"objective {name}: {attribute} in {_place(module)} returns a {type(made).__name__}; an Objective is wanted"
        )
    return made, {option: value for option, value in options.items() if option not in taken}


def _module(name: str, module_name: str) -> ModuleType:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there and lacks one of its own imports is another matter.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(f"objective {name}: the module {module_name!r} raises {_told(error)}") from error
        raise ValueError(
            f"objective {name}: there is no module {module_name!r}{_nearest(module_name, _modules_in(here))}; looked "
            f"for in {here} and on sys.path"
        ) from None
    except Exception as error:  # whatever a user's module does wrong is told to the user
        raise ValueError(f"objective {name}: the module {module_name!r} raises {_told(error)}") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _attribute(name: str, module: ModuleType, attribute: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [key for key in vars(found) if not key.startswith("_")] if hasattr(found, "__dict__") else []
            raise ValueError(
                f"objective {name}: {_place(module)} has no {attribute}{_nearest(part, known)}{_candidates(module)}"
            )
        found = getattr(found, part)
    return found


def _parameters(function: Any) -> list[str] | None:
    """The names that a callable takes; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature to ask for
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or f"the module {module.__name__}"


def _candidates(module: ModuleType) -> str:
    there = [key for key, value in vars(module).items() if isinstance(value, Objective)]
    return f"; objectives there: {', '.join(there[:8])}" if there else "; no objective is there"


def _modules_in(folder: str) -> list[str]:
    return [entry.name.removesuffix(".py") for entry in os.scandir(folder) if entry.name.endswith(".py")]


def _nearest(name: str, known: list[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _told(error: Exception) -> str:
    """An exception in one line, with the place in the user's code that it came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error}{place if 'importlib' not in place else ''}"
