"""A command whose verbs are files of their own, imported when they are called: help texts come from a table."""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nori_cluster.registry import Registry


def lazy_group(verbs: Registry, summaries: Mapping[str, str]) -> type[TyperGroup]:
    """The class for typer.Typer(cls=…). verbs: name → the app of its file; summaries: name → one line of help."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, summary in summaries.items():
                self.add_command(TyperCommand(name, help=summary))

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            return (name, typer.main.get_command(verbs[name]), rest) if name else (name, command, rest)

    return LazyGroup
