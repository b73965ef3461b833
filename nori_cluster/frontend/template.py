"""Conversation → prompt ids through a model's Jinja chat template, in a sandbox. Immutable after loading.

messages normalises what came in, literal keeps control tokens written by clients from becoming real ones and encodes.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from nori_cluster.checkpoint.folder import read_json_object, read_text
from nori_cluster.errors import CheckpointError, ClientError, ConfigError
from nori_cluster.frontend.literal import LiteralText
from nori_cluster.frontend.messages import normalise_messages
from nori_cluster.frontend.template_environment import chat_environment
from nori_cluster.frontend.tokenizer import SPECIAL_NAMES, Tokenizer, read_special_tokens

JINJA_FILE = "chat_template.jinja"
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
CONFIG_FILE = "tokenizer_config.json"
MAX_PROMPT_CHARS = 32 << 20
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", *SPECIAL_NAMES})
log = logging.getLogger(__name__)


class TemplateSource(msgspec.Struct, frozen=True):
    """A template's text and where it came from."""

    text: str
    origin: str


class ChatTemplate:
    """A model's template(s): `default`, and `tool_use` where the model has one for requests with tools.

    Control-token text inside messages, tools and kwargs stays text: see LiteralText.
    """

    def __init__(self, sources: Mapping[str, TemplateSource], special_tokens: Mapping[str, str]) -> None:
        """Compile. A syntax error is a CheckpointError with file and line."""
        environment = chat_environment()
        self._templates = {name: _Compiled(environment, source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path | str, override: str | None = None) -> "ChatTemplate":
        """Take, in this order: override (a file or the template itself), chat_template.jinja (and
        additional_chat_templates/tool_use.jinja), tokenizer_config.json. With none, `defined` is false and one
        warning is logged. Raises CheckpointError, or ConfigError when the override is not there."""
        folder = Path(folder)
        sources = {"default": _override(override)} if override else _sources(folder)
        if not sources:
            log.warning("%s has no chat template: chat requests will be refused (give one: --chat-template)", folder)
        return cls(sources, read_special_tokens(folder))

    @property
    def defined(self) -> bool:
        return bool(self._templates)

    @property
    def uses_tools(self) -> bool:
        """True when some template reads `tools`; requests with tools are refused otherwise."""
        return any("tools" in template.names for template in self._templates.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids; nothing is added that the template did not write (no second BOS).

        continue_final_message: the prompt ends with the last message's content, without a generation prompt.
        kwargs: extra template variables; those the template does not read are dropped. Raises ClientError.
        """
        template = self._choose(tools)
        variables = {
            **_checked_kwargs(kwargs or {}, template.names),
            "messages": normalise_messages(messages, keep_developer="developer" in template.text),
            "tools": tools or None,
        }
        literal = LiteralText(tokenizer, variables)
        fixed = self._special_tokens | {"add_generation_prompt": add_generation_prompt and not continue_final_message}

        def rendered(marked: dict[str, Any]) -> str:
            if not continue_final_message:
                return template.render(fixed | marked)
            marked["messages"][-1]["content"] += literal.end_mark + " "
            return _cut_at(template.render(fixed | marked), literal.end_mark)

        text = rendered(literal.mark(variables))
        if literal.may_join:
            literal.check_same_controls(text, rendered(literal.mark_borders(variables)))
        return literal.encode(text)

    def _choose(self, tools: list[dict[str, Any]] | None) -> "_Compiled":
        if not self._templates:
            raise ClientError(
                "no chat template is defined for this model: put chat_template.jinja into the model folder or start "
                "the server with --chat-template; /v1/completions works without one",
                param="messages",
            )
        template = self._templates["default"]
        if tools:
            template = self._templates.get("tool_use", template)
            if "tools" not in template.names:
                raise ClientError("this model's chat template does not take tools", param="tools")
        return template


class _Compiled:
    """One compiled template. names: every variable it mentions."""

    def __init__(self, environment: jinja2.Environment, source: TemplateSource) -> None:
        self.text = source.text
        try:
            tree = environment.parse(source.text)
            self._template = environment.from_string(source.text)
        except jinja2.TemplateSyntaxError as error:
            where = f"{source.origin}, line {error.lineno}"
            raise CheckpointError(f"{where}: chat template: {error.message}") from error
        self.names = frozenset(node.name for node in tree.find_all(nodes.Name))

    def render(self, variables: dict[str, Any]) -> str:
        """Whatever a template does wrong with these messages is the request's fault to the client: a ClientError."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise ClientError(f"the rendered prompt exceeds {MAX_PROMPT_CHARS} characters", param="messages")
        except ClientError:
            raise
        except jinja2.TemplateError as error:
            raise ClientError(f"the chat template refuses these messages: {error!s:.500}", param="messages") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.500}"
            raise ClientError(f"the chat template failed on these messages: {reason}", param="messages") from error
        return "".join(pieces)


def _cut_at(text: str, end_mark: str) -> str:
    """The text before the mark put after the last message's content, trimmed there if the template trims content."""
    at = text.rfind(end_mark)
    if at < 0:
        raise ClientError("the chat template does not write the last message's content", param="continue_final_message")
    return text[:at] if text[at + 1 :].startswith(" ") else text[:at].rstrip()


def _checked_kwargs(kwargs: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    for name in kwargs:
        if name in RESERVED:
            raise ClientError(f"chat_template_kwargs cannot set {name!r}", param=f"chat_template_kwargs.{name}")
    return {name: value for name, value in kwargs.items() if name in names}


def _override(override: str) -> TemplateSource:
    if "{{" in override or "{%" in override:
        return TemplateSource(override, "--chat-template")
    path = Path(override).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {override!r:.200}: no such file (nor a template: it has no '{{{{' or '{{%')"
        )
    try:
        return TemplateSource(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _sources(folder: Path) -> dict[str, TemplateSource]:
    text = read_text(folder, JINJA_FILE)
    if text is not None:
        sources = {"default": TemplateSource(text, str(folder / JINJA_FILE))}
        tool_use = read_text(folder, TOOL_USE_FILE)
        return sources if tool_use is None else sources | {"tool_use": TemplateSource(tool_use, TOOL_USE_FILE)}
    value = (read_json_object(folder, CONFIG_FILE) or {}).get("chat_template")
    path = folder / CONFIG_FILE
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": TemplateSource(value, f"{path} (chat_template)")}
    if not isinstance(value, list) or not all(_is_named(item) for item in value):
        raise CheckpointError(f"{path}: chat_template: expected a string or a list of {{name, template}}")
    named = {item["name"]: TemplateSource(item["template"], f"{path} ({item['name']})") for item in value}
    if named and "default" not in named:
        raise CheckpointError(f"{path}: chat_template: none of {', '.join(sorted(named))} is named 'default'")
    return named


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
