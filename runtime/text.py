"""Tokenizer and chat template, without torch or transformers. What a user writes never becomes a special token."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.engines.files import read_json

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
THINKING = "enable_thinking"  # variable of chat templates (Qwen3)
GOLDEN, GOLDEN_PASS = "golden.json", "golden.npz"
Message = Mapping[str, str]


class Text:
    """Text to token ids and back.

    Args:
        folder: holds `tokenizer.json` and, for chat, `chat_template.jinja`.
        reserved: ids that text must never give, special in the tokenizer or not (SDAR's mask is not).
        named: named tokens that templates may use, such as `bos_token`.
        fix: what an error about the files advises.
    """

    def __init__(
        self,
        folder: Path,
        reserved: Sequence[int] = (),
        named: Mapping[str, str] | None = None,
        fix: str = "export the bundle again",
    ):
        from tokenizers import Tokenizer

        try:
            written = (folder / TOKENIZER).read_text(encoding="utf-8")
            document = json.loads(written)
            # The template's own special tokens are meant; in user text they are text.
            self._template_tokenizer = Tokenizer.from_str(written)
            for token in document.get("added_tokens", []):
                token["special"] |= token["id"] in reserved
            self._tokenizer = Tokenizer.from_str(json.dumps(document))
            template = folder / TEMPLATE
            self._template = template.read_text(encoding="utf-8") if template.is_file() else None
        except Exception as error:  # tokenizers raises bare Exception
            raise SpotDeployError(
                "tokenizer",
                f"cannot read {TOKENIZER} or {TEMPLATE} in {folder}",
                seen=str(error),
                fix=fix,
            ) from error
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]
        decoder = self._template_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(n for n, token in decoder.items() if token.special or n in reserved)
        self._named = dict(named or {})

    def known_ids(self) -> list[int]:
        """Every token id that the tokenizer can decode."""
        return sorted(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def size(self) -> int:
        """Token ids that the tokenizer knows are below this."""
        return self.known_ids()[-1] + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens spelled out in it stay text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The chat template applied to messages, ending where the assistant's answer begins.

        Args:
            thinking: the template's switch `enable_thinking`; None leaves it at the template's own default.

        Raises:
            SpotDeployError: the target has no template, the template refuses the messages, or it has no such switch.
        """
        if self._template is None:
            raise SpotDeployError(
                "no-chat-template", "this target has no chat template", fix="leave out --chat and give the plain prompt"
            )
        if thinking is not None and THINKING not in self._template:
            raise usage_error(
                "no-thinking-switch",
                "this target's chat template has no switch for thinking",
                fix="leave out --thinking and --no-thinking",
            )
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        class Generation(jinja2.ext.Extension):
            """Templates mark in `{% generation %}` what training looks at; here it is text like any other."""

            tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

            def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment.add_extension(Generation)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda x, **more: json.dumps(x, **({"ensure_ascii": False} | more))
        try:
            return environment.from_string(self._template).render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._named,
                **({} if thinking is None else {THINKING: thinking}),
            )
        except jinja2.TemplateSyntaxError as error:
            raise SpotDeployError(
                "chat-template", "the chat template is broken", seen=str(error), fix="export the bundle again"
            ) from error
        except Exception as error:  # whatever a template does with the messages
            raise SpotDeployError(
                "chat-template",
                "the chat template refuses these messages",
                seen=f"{type(error).__name__}: {error}",
                fix="check the roles and their order",
            ) from error

    def encode_chat(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """Token ids of rendered messages; only the template's own special tokens count as such. As `render`."""
        for message in messages:
            for key, value in message.items():
                if key != "content" and self._special_ids.intersection(self._encode_template(str(value))):
                    raise usage_error(
                        "chat-message", f"{key} of a message holds a special token", seen=str(value)[:100],
                        fix="give a plain role such as user, assistant or system",
                    )  # fmt: skip
        # A tokenizer may normalise text into special tokens, so what counts is what it makes of the contents.
        if not any(
            self._special_ids.intersection(self._encode_template(m["content"]))
            or any(token in m["content"] for token in self._special)
            for m in messages
        ):
            return self._encode_template(self.render(messages, thinking))
        # Contents that spell out special tokens are replaced by marks, and encoded apart.
        used = {character for m in messages for character in m["content"]}
        free = (chr(n) for n in range(0xF0000, 0xFFFFE) if chr(n) not in used)
        marks = [mark for _, mark in zip(messages, free, strict=False)]
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        rendered = self.render(marked, thinking)
        ids: list[int] = []
        text = ""
        for character in rendered:
            if character in marks:
                ids += self._encode_template(text) + self.encode(messages[marks.index(character)]["content"])
                text = ""
            else:
                text += character
        return ids + self._encode_template(text)

    def _encode_template(self, text: str) -> list[int]:
        ids: list[int] = self._template_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def check_golden(self, folder: Path) -> None:
        """Compare with the encodings that were recorded at export by the checkpoint's own tokenizer.

        Raises:
            SpotDeployError: this version of tokenizers or jinja2 gives other ids.
        """
        fix = "export the bundle again"
        golden = read_json(folder / GOLDEN, code="golden", fix=fix)
        try:
            cases = [("text", case["text"], self.encode(case["text"]), case["ids"]) for case in golden["encodings"]]
            cases += [
                ("chat", case["messages"], self.encode_chat(case["messages"], case["thinking"]), case["ids"])
                for case in golden["chats"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise SpotDeployError("golden", f"{GOLDEN} is damaged", seen=repr(error)[:200], fix=fix) from error
        for kind, source, seen, wanted in cases:
            if seen != wanted:
                raise SpotDeployError(
                    "golden-encoding",
                    f"the tokenizer encodes a recorded {kind} differently: {source!r}",
                    seen=str(seen),
                    wanted=str(wanted),
                    fix="install the versions of tokenizers and jinja2 named in the manifest, or export again",
                )


class Detokenizer:
    """Grows a text as its token ids settle; what it has given out never changes.

    Only the ids since the last clean boundary, and the piece before them for context, are decoded anew each time.
    """

    def __init__(self, text: Text):
        self._text = text
        self._context, self._settled = 0, 0  # the last two clean boundaries

    def update(self, ids: Sequence[int], *, final: bool = False) -> str:
        """The new piece of text for all settled ids so far. An unfinished character waits, unless `final`."""
        known = self._text.decode(ids[self._context : self._settled])
        whole = self._text.decode(ids[self._context :])
        if not final and whole.endswith("\ufffd"):
            return ""
        if not whole.startswith(known):
            raise RuntimeError("decoding more tokens changed earlier text: this tokenizer cannot be streamed")
        self._context, self._settled = self._settled, len(ids)
        return whole[len(known) :]
