# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model would be replaced."""

from __future__ import annotations

import inspect
import pkgutil
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ds_moe_ext.commands.conversion.description import BUILDER, is_model_file
from ds_moe_ext.files.documents import file_of, names_of, read_document
from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.hosts.attachment.modules import check_not_tied, unknown_experts
from ds_moe_ext.hosts.deepspeed.startup import FINDERS
from ds_moe_ext.planning.model_shape import MOST_LAYERS
from ds_moe_ext.strict import check_object, nearest_and_all


def layers_table(model: str) -> Table:
    """The layers of a model, built without memory. It is named by a path of a Hugging Face config
    or of a file like those of configs/models, by a name there, or ``"package.module:function"``.
    """
    with torch.device("meta"):
        built = _built(model)
    title, headings = f"layers of {type(built).__name__} to replace", ("layer", "kind", "experts")
    table = Table(*headings, "parameters", title=title, title_justify="left")
    found_all = [found for finder in FINDERS for found in finder(built, any_name)]
    check_not_tied(built, found_all)
    for found in found_all:
        module = built.get_submodule(found.name)
        count = sum(p.numel() for p in module.parameters())
        table.add_row(found.name, found.kind, str(found.num_experts), f"{count:,}")
    if not table.row_count:
        table.add_row("none found", "", "", "")
    for unknown in unknown_experts(built, [found.name for found in found_all], any_name):
        table.add_row(unknown, "unknown: stays unchanged", "", "")
    return table


def _built(model: str) -> nn.Module:
    path = file_of("models", model)
    if ":" in model and not path.exists():
        sys.path.insert(0, str(Path.cwd()))  # a person's own module is where they are
        try:
            build = pkgutil.resolve_name(model)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--model is {model!r}, which cannot be imported: {error}") from error
        _check_takes_nothing(model, build)
        built = build()
    elif path.exists():
        built = _of_file(path)
    else:
        raise ValueError(
            f"--model is {model!r}, which is neither a file or folder nor 'package.module:function'"
            f", nor a name of configs/models; {nearest_and_all(model, names_of('models'))}"
        )
    if not isinstance(built, nn.Module):
        raise ValueError(f"--model is {model!r}, which gives no module but {built!r}")
    return built


def _check_takes_nothing(model: str, build: Any) -> None:
    """Whether it can be called as it is called here."""
    if not callable(build):
        raise ValueError(
            f"--model is {model!r}, which is not a function but {reprlib.repr(build)}; name "
            "one that takes no arguments and returns the model"
        )
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ValueError(
            f"--model is {model!r}, which cannot be called without arguments ({error}); name "
            "your own function that calls it with them"
        ) from error
    except ValueError:
        pass  # of a function in C, which does not say what it takes


def _of_file(path: Path) -> Any:
    """The model of a config: Hugging Face's, or a file like those of configs/models."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        document = read_document(path) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"--model is {str(path)!r}, which cannot be read ({error}); name a model's config"
        ) from error
    if not is_model_file(document):
        return _made(path, lambda: _of_config(AutoConfig.from_pretrained(path)))
    family, config = document["family"], document["config"]
    check_object(f"--model is {str(path)!r}, and config", config)
    if BUILDER in document:
        return _of_builder(path, document[BUILDER], config)
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ValueError(
            f"--model is {str(path)!r}, which is of family {family!r}, which transformers does "
            f"not know; add {BUILDER!r}: FILE.py:function, which builds the model from its "
            "config"
        )
    return _made(path, lambda: _of_config(AutoConfig.for_model(family, **config)))


def _made(path: Path, make: Callable[[], Any]) -> Any:
    """What transformers makes of a file."""
    try:
        return make()
    except Exception as error:  # a config that is wrong may raise anything, anywhere
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise ValueError(
            f"--model is {str(path)!r}, from which transformers builds no model ({reason}); "
            "correct its config"
        ) from error


def _of_builder(path: Path, builder: str, config: dict[str, Any]) -> Any:
    """What ``"FILE.py:function"`` makes of a config; the file is named from the model file."""
    name, _, function = builder.rpartition(":")
    code = path.resolve().parent / name
    sys.path.insert(0, str(code.parent))  # as when a script there runs
    try:
        build = pkgutil.resolve_name(f"{code.stem}:{function}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--model is {str(path)!r}, which names {builder!r} as its {BUILDER!r}, which cannot "
            f"be imported ({error}); name FILE.py:function, the file from where the model file lies"
        ) from error
    return build(config)


def _of_config(config: Any) -> Any:
    """As the class that the config names builds it, or else the first that takes such configs."""
    import transformers

    num_layers = getattr(config, "num_hidden_layers", None) or 0
    if num_layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers is {num_layers}, but at most {MOST_LAYERS:,} are built"
        )
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    architecture = next((cls for cls in named if cls is not None), None)
    if architecture is not None:
        return architecture._from_config(config)
    autos = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModel,
    )
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), autos[0])
    return auto.from_config(config)
