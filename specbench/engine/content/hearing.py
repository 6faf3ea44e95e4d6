"""From clips to what the audio tower takes, beside the engine's steps.

Belongs here: the way through decoding and features, and the threads that go it. Does not belong here: either of the two
(audio_files.py, dmel.py), where a clip stands in a prompt (placement.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

from specbench.engine.content.audio_files import read_audio
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.content.dmel import features
from specbench.engine.content.placement import Content
from specbench.errors import UserError
from specbench.generate import AudioSource

Item = TypeVar("Item")

#: A clip of ten seconds takes some 20 ms of one core; libraries let go of Python's lock meanwhile.
_NUM_THREADS = 4


def hear(source: AudioSource) -> Content:
    """A clip as bins. UserError where it can't be heard."""
    return Content(AUDIO, features(read_audio(source)))


class ClipReader(Generic[Item]):
    """Hears the clips of items (requests on their way in) while the engine goes on with others."""

    def __init__(self) -> None:
        # Threads begin with the first clip.
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="specbench-audio")
        self._at_once: list[Item] = []
        self._reading: list[tuple[Item, Future[list[Content]]]] = []

    def __enter__(self) -> ClipReader[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def put(self, item: Item, audio: Sequence[AudioSource]) -> None:
        """An item without audio waits for no other."""
        if audio:
            self._reading.append((item, self._executor.submit(lambda: [hear(source) for source in audio])))
        else:
            self._at_once.append(item)

    def take(self) -> list[tuple[Item, list[Content] | UserError]]:
        """Items whose clips have been heard since the last call, in the order in which they came, and what was heard,
        or why it can't be. Does not wait."""
        taken: list[tuple[Item, list[Content] | UserError]] = [(item, []) for item in self._at_once]
        self._at_once.clear()
        reading, self._reading = self._reading, []
        for item, future in reading:
            if future.done():
                taken.append((item, _outcome(future)))
            else:
                self._reading.append((item, future))
        return taken

    def wait(self) -> bool:
        """Until `take` has something to give; False at once where nothing is being read."""
        if not self._at_once and self._reading:
            wait([future for _, future in self._reading], return_when=FIRST_COMPLETED)
        return bool(self._at_once or self._reading)


def _outcome(future: Future[list[Content]]) -> list[Content] | UserError:
    error = future.exception()
    if error is None or not isinstance(error, UserError):
        return future.result()
    return error
