"""The prompt of `wavefill generate`: text, cut to a number of tokens, in the model's chat form."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from wavefill.spec import invalid

#: Tokens of the prompt when a model and the caller leave it open.
DEFAULT_CONTEXT = 7900

_BOOK = "alice.txt"
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the text while the chat form is laid around it


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and where its text came from."""

    ids: list[int]
    source: str


def built_in_text() -> str:
    """The text shipped with the package: chapters II to IV of Alice's Adventures in Wonderland (see NOTICE)."""
    return (files("wavefill") / "data" / _BOOK).read_text(encoding="utf-8")


def build(tokenizer: Any, text: str | None, context: int | None, *, chat: bool, room: int) -> Prompt:
    """Tokens of `text`, or of the shipped text when it is None.

    context: tokens of the prompt; the text is cut at its end until it has that many. None takes a given text as it
             is, and of the shipped text as much as makes 7,900 tokens or fits in `room`.
    chat:    lay the model's chat form around a given text; a tokenizer without one takes it as it is. The shipped text
             never gets it: the model goes on with the book.
    room:    most tokens that the model takes as a prompt.

    Raises InvalidArgument when the text is too short for `context`, empty, or longer than `room`.
    """
    source = "given"
    if text is None:
        text, chat, source = built_in_text(), False, f"wavefill/data/{_BOOK}"
        context = min(DEFAULT_CONTEXT, room) if context is None else context
    before = after = ""
    chat = chat and bool(getattr(tokenizer, "chat_template", None))
    if chat:
        before, _, after = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False).partition(_MARK)
    start, end = _ids(tokenizer, before, start_of_text=not chat), _ids(tokenizer, after)
    middle = _ids(tokenizer, text)
    if not middle:
        raise invalid("prompt", "must hold text", "nothing", "Give a file with text, or leave the option out.")
    whole = len(start) + len(middle) + len(end)
    if context is not None:
        least = len(start) + len(end) + 1
        if not least <= context <= whole:
            raise invalid("context", f"must be {least} to {whole} tokens, what this prompt can be cut to", context,
                          "Choose a number in this range or give a longer text.")
        middle = middle[:context - least + 1]
    ids = start + middle + end
    if len(ids) > room:
        raise invalid("prompt", f"must leave room for the new tokens, so have at most {room} tokens", len(ids),
                      "Cut it with --context, or ask for fewer new tokens.")
    return Prompt(ids, source)


def _ids(tokenizer: Any, text: str, *, start_of_text: bool = False) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=start_of_text, verbose=False).input_ids
    return ids
