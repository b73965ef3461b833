"""The Jinja sandbox chat templates run in: what the reference library offers them, nothing more.

Settings and globals follow transformers' chat_template_utils (trim_blocks, lstrip_blocks, tojson, raise_exception,
strftime_now, the generation tag, loop controls).
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def chat_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum", None)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_new_namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, not escaped for HTML as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """In place of the type, whose attributes a template has no business with."""
    return dict(*args, **kwargs)


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    return _PublicNamespace(*args, **kwargs)


class _PublicNamespace(Namespace):
    """Jinja's namespace without underscore names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r} on a namespace")
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %}: marks assistant text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
