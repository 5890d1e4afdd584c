"""Listings of image folders: the images to train on, with their captions.

    folder/metadata.jsonl      {"file_name": "cat.png", "text": "a cat on a sofa"}   one for each line
    folder/metadata.csv        file_name,text                                        the same as a table
    folder/cat.txt             a cat on a sofa                                       next to cat.png

The first two are the layout of Hugging Face's ImageFolder, the third that of most trainers. A folder with metadata
consists of what they list; a text next to one of these images must say the same. In a folder without, images are
found by their endings. A companion of an image (a condition, a mask, a reference) is named by a key of the
metadata, or is the file of the same name in a folder: `folder/masks/cat.png`. Of references there may be several:

    {"file_name": "both.png", "text": "she wears the hat", "references": ["her.png", "hat.png"]}

which in a table are written so, too: `"[""her.png"", ""hat.png""]"`.
"""

import contextlib
import csv
import io
import json
import mimetypes
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image

from lightning_diffpipe.data.pixels import IMAGES, VIDEOS
from lightning_diffpipe.errors import ConfigurationError, DataError

METADATA = ("metadata.jsonl", "metadata.csv")
_KINDS = mimetypes.MimeTypes()  # Python's own; those of the host differ from machine to machine


class Entry(NamedTuple):
    """An image or video, its caption, its companion files by kind, and its origin for messages.

    Attributes:
        path: Path of the image, or its content, whose text is its name.
        companions: Files of a `"condition"`, a `"mask"` and the first, second, ... of `"references"` (in a tuple),
            as far as they are asked for.
        where: The listing and line, or the file of the caption, for messages.
        weight: Weight of its loss.
    """

    path: Path | IO[bytes]
    caption: str
    companions: Mapping[str, Any]
    where: str
    weight: float = 1.0

    def called(self, file: Path | IO[bytes] | None = None) -> str:
        """Returns the name of the image, or of a file next to it, in messages."""
        return f"{file or self.path} ({self.where})"


@dataclass(frozen=True)
class Listing:
    """Reads the listing of a folder.

    Attributes:
        caption_key: Key, or column, of the caption.
        companions: Keys of files next to each image, by kind: `{"mask": "masks"}`.
        has_videos: Whether to list videos, files or folders, too.
        needs_captions: Whether an image found without caption is refused; else it has an empty one.
    """

    folder: Path
    caption_key: str = "text"
    companions: Mapping[str, str] = field(default_factory=dict)
    has_videos: bool = False
    needs_captions: bool = True

    def read(self, on_error: str) -> tuple[list[Entry], list[DataError]]:
        """Reads all entries.

        Returns:
            The entries, and what is wrong with those left out.

        Raises:
            DataError: One cannot be used, and `on_error` is `"raise"`.
            ConfigurationError: There is no such folder, nothing in it, or two listings.
        """
        entries, errors = list[Entry](), list[DataError]()
        for read in self._readers(on_error, errors):
            try:
                entries.append(read())
            except DataError as error:
                if on_error == "raise":
                    raise
                errors.append(error)
        if not entries:
            paths = sorted(self.folder.iterdir())
            inner = [x.name for x in paths if x.is_dir() and not x.name.startswith(".")]
            named = f", or name its folders ({inner[0]}), which are not searched" if inner else ""
            raise ConfigurationError(
                f"folder={self.folder} lists no image{' that can be used' if errors else ''}; give each a line of "
                f"metadata.jsonl, or a caption: cat.txt beside cat.png{named}"
            )
        return entries, errors

    def _readers(self, on_error: str, errors: list[DataError]) -> list[Callable[[], Entry]]:
        """Returns a function for each entry, which raises DataError for one that cannot be used."""
        if not self.folder.is_dir():
            problem = "is no folder" if self.folder.exists() else "does not exist"
            raise ConfigurationError(f"folder={self.folder} {problem}; name one with images")
        listings = [self.folder / name for name in METADATA if (self.folder / name).is_file()]
        if len(listings) > 1:
            raise ConfigurationError(
                f"folder={self.folder} has both {' and '.join(METADATA)}; remove one of them"
            )
        if not listings:
            return self._found(on_error, errors)
        (listing,), content = listings, listings[0].read_bytes()
        if listing.suffix == ".jsonl":
            # JSON may hold U+2028 and other characters as they are, at which `splitlines` would cut.
            lines = enumerate(content.split(b"\n"), start=1)
            return [
                partial(self._of_line, line, f"{listing.name}, line {number}")
                for number, line in lines
                if line.strip()
            ]
        text = io.StringIO(decoded(content, str(listing)), newline="")
        rows = csv.DictReader(text, strict=True)  # else an open quote takes in the lines after it
        try:
            return [
                partial(self._of_values, row, f"{listing.name}, line {rows.line_num}")
                for row in rows
            ]
        except csv.Error as error:
            raise DataError(
                f"{listing}, up to line {rows.line_num}: {error}; quotes around a text must be closed, and "
                "those in it written twice"
            ) from error

    def _of_line(self, line: bytes, where: str) -> Entry:
        text = decoded(line, f"{self.folder / where}")
        try:
            return self._of_values(json.loads(text), where)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(self._expected(where, text)) from error

    def _expected(self, where: str, text: str) -> str:
        *first, last = map(repr, ("file_name", self.caption_key, *self.companions.values()))
        kinds = (
            f" ({', '.join(f'the {kind}' for kind in self.companions)})" if self.companions else ""
        )
        return (
            f"{self.folder / where}: expected {', '.join(first)} and {last}{kinds}, as in "
            f'{{"file_name": "cat.png", "text": "a cat"}}, but found {text[:80]!r}'
        )

    def _of_values(self, values: Any, where: str) -> Entry:
        """Returns the entry of a line or row."""
        keys = "file_name", self.caption_key, *self.companions.values()
        try:
            texts = [values[key] for key in keys]
        except (KeyError, TypeError) as error:
            raise DataError(self._expected(where, json.dumps(values))) from error
        at = f"{self.folder / where}"
        kinds = "image", "caption", *self.companions
        for index, (key, text, kind) in enumerate(zip(keys, texts, kinds, strict=True)):
            if kind == "references":
                texts[index] = _several(text, f"{at}: {key!r}")
            elif not isinstance(text, str):
                raise DataError(f"{at}: {key!r} must be a text, but is {json.dumps(text)[:80]}")
        name, caption, *names = texts
        find = lambda each: self._there(self.folder / each, at)
        path = find(name)
        others = [find(each) if isinstance(each, str) else tuple(map(find, each)) for each in names]
        text = path.with_suffix(".txt")
        if text.is_file() and (other := _caption_in(text)) != " ".join(caption.split()):
            raise DataError(
                f"{path} has two captions: {text.name} says {other[:80]!r}, and {where} {caption[:80]!r}; keep one "
                "of them"
            )
        return Entry(path, caption, dict(zip(self.companions, others, strict=True)), where)

    def _found(self, on_error: str, errors: list[DataError]) -> list[Callable[[], Entry]]:
        """Finds images by their endings and captions next to them."""
        endings = IMAGES | VIDEOS if self.has_videos else IMAGES
        kind = "image or video" if self.has_videos else "image"
        paths = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        texts = {_stem(p): p for p in paths if p.suffix.lower() == ".txt" and p.is_file()}
        images = {path: _stem(path) for path in paths if path.suffix.lower() in endings}
        if self.has_videos:  # folders of frames
            folders = {path: _nfc(path.name) for path in paths if path.is_dir()}
            images |= {path: name for path, name in folders.items() if name in texts}
        passed_over = Counter(path.suffix for path in paths if path not in images and _shows(path))
        if passed_over:
            counts = ", ".join(f"{count} {suffix}" for suffix, count in passed_over.items())
            are_videos = not self.has_videos and any(end.lower() in VIDEOS for end in passed_over)
            how = "; num_frames=17 (data.num_frames=17) reads videos" if are_videos else ""
            rank_zero_warn(f"{self.folder}: not trained on, by their endings: {counts}{how}")
        alone = [text.name for stem, text in texts.items() if stem not in images.values()]
        problems = [(f"caption files have no {kind} beside them", alone, "Add these")]
        if self.needs_captions:
            bare = [path.name for path, stem in images.items() if stem not in texts]
            remedy = (
                "Write them (cat.txt beside cat.png, maybe empty), give all one by data.trigger"
            )
            problems += [(f"{kind}s have no caption", bare, remedy)]
        for problem, names, remedy in problems:
            if names and on_error == "raise":
                more = f", and {len(names) - 3} more" if len(names) > 3 else ""
                raise DataError(
                    f"{self.folder}: {len(names)} {problem}: {', '.join(names[:3])}{more}. {remedy}, or leave "
                    "these out with on_error='skip' (data.on_error=skip)"
                )
            errors += [DataError(f"{self.folder / name}: {problem}") for name in names]
        folders = {key: self._by_stem(key) for key in self.companions.values()}
        return [
            partial(self._of_files, path, texts.get(stem), folders)
            for path, stem in images.items()
            if stem in texts or not self.needs_captions
        ]

    def _by_stem(self, key: str) -> dict[str, list[Path]]:
        folder = self.folder / key
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder} is no folder, and there are no metadata whose {key!r} names a file for each image; put "
                f"there files of the same names as the images, such as {key}/cat.png"
            )
        by_stem: dict[str, list[Path]] = {}
        for path in sorted(folder.iterdir()):
            by_stem.setdefault(_stem(path), []).append(path)
        return by_stem

    def _of_files(
        self, path: Path, text: Path | None, folders: Mapping[str, Mapping[str, list[Path]]]
    ) -> Entry:
        companions: dict[str, Any] = {}
        for kind, key in self.companions.items():
            files = folders[key].get(_stem(path), [])
            if len(files) != 1:
                raise DataError(
                    f"{path} has no {kind}: {self.folder / key / path.name} is not there"
                    if not files
                    else f"{path} has {len(files)} files as its {kind}: {self.folder / key} has "
                    f"{', '.join(file.name for file in files)}; keep one of them"
                )
            file = self._there(files[0], str(path))
            companions[kind] = (file,) if kind == "references" else file
        caption = "" if text is None else _caption_in(text)
        where = "no caption" if text is None else text.name
        return Entry(self._there(path, str(path)), caption, companions, where)

    def _there(self, path: Path, where: str) -> Path:
        """Returns a path to a file that is not empty, or raises DataError; images are opened in training only."""
        if self.has_videos and path.is_dir():
            return path
        try:
            status = path.stat()
        except (OSError, ValueError) as error:  # no such file; a name that none can have
            reason = getattr(error, "strerror", error)
            raise DataError(f"{where}: {path} cannot be found ({reason})") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{where}: {path} is no file")
        if not status.st_size:
            raise DataError(f"{where}: {path} is empty (0 bytes)")
        return path


def _shows(path: Path) -> bool:
    """Returns whether a file is an image or a video of any kind, by its ending."""
    opened_as = Image.registered_extensions().get(path.suffix.lower())
    kind = _KINDS.guess_type(path.name)[0] or Image.MIME.get(opened_as, "")
    return kind.startswith(("image/", "video/"))


def _stem(path: Path) -> str:
    return _nfc(path.stem)


def _nfc(name: str) -> str:
    """Returns a name with accents as most systems write them, not as macOS does."""
    return unicodedata.normalize("NFC", name)


def _several(value: Any, called: str) -> list[str]:
    """Returns the names in a value: one, or a list, which in a table is a text in JSON."""
    names = value
    if isinstance(value, str):
        names = [value]
        if value.lstrip().startswith("["):
            with contextlib.suppress(json.JSONDecodeError):
                names = json.loads(value)
    if isinstance(names, list) and names and all(isinstance(n, str) and n for n in names):
        return names
    raise DataError(
        f'{called} must name a file, or several as in ["a.png", "b.png"], but is {json.dumps(value)[:80]}'
    )


def decoded(content: bytes, where: str) -> str:
    """Returns content as text; raises DataError if it is no UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: {content[:80]!r} is no UTF-8 ({error.reason}); write it in UTF-8"
        ) from error


def _caption_in(path: Path) -> str:
    """Returns the words of a file, in one line."""
    return " ".join(decoded(path.read_bytes(), str(path)).split())
