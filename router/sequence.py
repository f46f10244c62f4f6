"""One output sequence as the client will see it: tokens in, text with stops and logprobs out.

Pure: no I/O and no clock. It outlives the attempts that feed it, so a retry goes on where the
lost attempt stopped, and text held back for a stop string is held across attempts too.
"""

from collections import deque
from dataclasses import dataclass

from core.ids import RequestId
from core.messages import FinishReason, Output, RequestStats
from core.sampling import SamplingParams, TokenLogprobs
from router.detokenizer import IncrementalDetokenizer
from router.stop_strings import StopStringMatcher
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What is to be generated."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One shown token with its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int
    """Characters of the output before this token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output added to the text that may be shown."""

    text: str
    token_ids: tuple[int, ...] = ()
    """Every token fed, those without shown text included."""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens fed."""
        return len(self.token_ids)


class Sequence:
    """Text assembly of one sequence.

    Invariants:
        * joined deltas equal the text of all tokens up to the end or the first stop string;
        * ``token_ids`` holds every token fed, in order, the one that ended it included;
        * after a finish nothing more is accepted.
    """

    def __init__(self, spec: SequenceSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stats: RequestStats | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, spec.prompt_token_ids)
        self._matcher = StopStringMatcher(spec.stop)
        self._unshown: deque[TokenEntry] = deque()
        self._num_shown_chars = 0
        self._num_decoded_chars = 0

    def feed(self, output: Output) -> Delta:
        """Return what ``output`` adds. ``finish_reason`` may come from a stop string."""
        shown: list[str] = []
        num_before = len(self.token_ids)
        self.stats = output.stats or self.stats
        for index, token_id in enumerate(output.token_ids):
            if self.finish_reason is not None:
                break
            logprobs = output.logprobs[index] if index < len(output.logprobs) else None
            last = output.finish_reason is not None and index == len(output.token_ids) - 1
            hidden = last and self._ends_by(token_id, output.finish_reason)
            shown.append(self._feed_token(token_id, logprobs, hidden=hidden))
        if output.finish_reason is not None and self.finish_reason is None:
            shown.append(self._finish(output.finish_reason))
        text = "".join(shown)
        self._num_shown_chars += len(text)
        token_ids = tuple(self.token_ids[num_before:])
        return Delta(text, token_ids, self._shown_entries(), self.finish_reason)

    def _ends_by(self, token_id: int, reason: FinishReason | None) -> bool:
        """Whether this token ends the sequence and so is no part of its text."""
        return reason == "stop" and token_id in self.spec.sampling.stop_token_ids

    def _feed_token(self, token_id: int, logprobs: TokenLogprobs | None, *, hidden: bool) -> str:
        self.token_ids.append(token_id)
        if hidden:
            return ""
        if logprobs is not None:
            self._unshown.append(TokenEntry(token_id, logprobs, self._num_decoded_chars))
        return self._scan(self._detokenizer.feed(token_id))

    def _scan(self, piece: str) -> str:
        self._num_decoded_chars += len(piece)
        if len(self.token_ids) <= self.spec.sampling.min_tokens:
            return self._matcher.flush() + piece
        scan = self._matcher.feed(piece)
        if scan.stop is not None:
            self.finish_reason = "stop"
        return scan.text

    def _finish(self, reason: FinishReason) -> str:
        text = self._scan(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            text += self._matcher.flush()
        return text

    def _shown_entries(self) -> tuple[TokenEntry, ...]:
        """Take the entries of tokens whose text has begun to show; at the end, of all not cut."""
        is_whole = self._num_shown_chars == self._num_decoded_chars
        takes_all = self.finish_reason is not None and is_whole
        entries: list[TokenEntry] = []
        while self._unshown and (takes_all or self._unshown[0].text_offset < self._num_shown_chars):
            entries.append(self._unshown.popleft())
        return tuple(entries)
