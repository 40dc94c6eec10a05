"""CIFAR-10 from its published files: the binary or the Python version, a folder or the archive.

    images = read_cifar("cifar-10-python.tar.gz")  # or the folder that it unpacks to
    images.train_x.shape, images.train_x.dtype  # (50000, 32, 32, 3), uint8

A file that is too short, too long, changed or mislabelled is an error. The Python version consists
of pickles, which can run any program when they are loaded: the reader here builds byte arrays,
lists and dicts from them and refuses everything else.
"""

import hashlib
import io
import pathlib
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
RECORDS = 10_000
PIXELS = 3 * 32 * 32
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
MD5 = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


class Images(NamedTuple):
    """Images uint8 (n, height, width, channels) and labels int32 (n,), for training and testing."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def read_cifar(path, *, records: int = RECORDS, md5: Mapping[str, str] = MD5) -> Images:
    """Read all of CIFAR-10.

    Args:
        path: A folder with the files of one version, the folder around it, or an archive.
        records: Images in each file; the published ones have 10 000.
        md5: Checksums by file name; a file without one is not compared.

    Raises:
        ValueError: If files are missing or are not what was published.
    """
    files = _open(pathlib.Path(path), md5)
    binary = files.has("data_batch_1.bin")
    if not binary and not files.has("data_batch_1"):
        raise _error(f"{files.place} has neither data_batch_1.bin nor data_batch_1")
    read = _read_binary if binary else _read_python
    (_check_names_binary if binary else _check_names_python)(files)
    *train, (test_x, test_y) = (read(files, name, records, md5) for name in (*TRAIN, "test_batch"))
    images, labels = zip(*train, strict=True)
    return Images(np.concatenate(images), np.concatenate(labels), test_x, test_y)


def _error(what: str) -> ValueError:
    return ValueError(f"CIFAR-10: {what}. The published files are at {PAGE}")


# ---------------------------------------------------------------- where files lie


class _Folder:
    def __init__(self, path: pathlib.Path) -> None:
        inside = [path / name for name in FOLDERS if (path / name).is_dir()]
        self.path = self.place = inside[0] if inside else path

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def size(self, name: str) -> int:
        if not self.has(name):
            raise _error(f"{self.path / name} is missing")
        return (self.path / name).stat().st_size

    def read(self, name: str) -> bytes:
        self.size(name)
        return (self.path / name).read_bytes()


class _Archive:
    """The files of an archive, in memory: no name in the archive becomes a path on disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self.place, self.files = path, {}
        try:
            with tarfile.open(path, "r:gz") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    if folder in FOLDERS and member.isfile():
                        self.files[name] = archive.extractfile(member).read()
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise _error(f"{path} cannot be unpacked ({error})") from error

    def has(self, name: str) -> bool:
        return name in self.files

    def size(self, name: str) -> int:
        return len(self.read(name))

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise _error(f"{self.place} has no {name}")
        return self.files[name]


def _open(path: pathlib.Path, md5: Mapping[str, str]) -> _Folder | _Archive:
    if path.is_dir():
        return _Folder(path)
    if not path.is_file():
        raise _error(f"no such file or folder: {path}")
    known = [md5[name] for name in ARCHIVES if name in md5]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if known and found not in known:
        raise _error(
            f"an archive is {' or '.join(ARCHIVES)} with the MD5 {' or '.join(known)}; {path} "
            f"({path.stat().st_size:,} bytes) has {found}"
        )
    return _Archive(path)


# ---------------------------------------------------------------- binary version


def _read_binary(files, name: str, records: int, md5: Mapping[str, str]) -> tuple[Any, Any]:
    """Read records of a label byte and 3072 pixel bytes: red, green, blue, each row by row."""
    name += ".bin"
    _check_size(files, name, records, exact=True)
    content = files.read(name)
    _check_md5(files, name, content, md5)
    table = np.frombuffer(content, np.uint8).reshape(records, 1 + PIXELS)
    return _images(table[:, 1:]), _labels(table[:, 0], f"{files.place}/{name}")


def _check_names_binary(files) -> None:
    names = files.read("batches.meta.txt").decode("ascii", "replace").split()
    _check_classes(names, f"{files.place}/batches.meta.txt")


# ---------------------------------------------------------------- Python version


def _read_python(files, name: str, records: int, md5: Mapping[str, str]) -> tuple[Any, Any]:
    """Read a pickled dict: `data` uint8 (n, 3072), `labels` a list of n integers."""
    _check_size(files, name, records, exact=False)
    content, place = files.read(name), f"{files.place}/{name}"
    _check_md5(files, name, content, md5)
    batch = _unpickle(content, place)
    data, labels = batch.get("data"), batch.get("labels")
    shape = (records, PIXELS)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != shape:
        got = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else type(data)
        raise _error(f"data is uint8{list(shape)}; in {place} it is {got}")
    if not isinstance(labels, list) or len(labels) != records:
        size = f" of {len(labels)}" if isinstance(labels, list) else ""
        raise _error(f"labels is a list of {records:,}; in {place} a {type(labels).__name__}{size}")
    if not all(type(label) is int for label in labels):
        raise _error(f"labels must be whole numbers; {place} has others")
    return _images(data), _labels(np.array(labels), place)


def _check_names_python(files) -> None:
    place = f"{files.place}/batches.meta"
    names = _unpickle(files.read("batches.meta"), place).get("label_names")
    names = [_text(name) for name in names] if isinstance(names, list) else []
    _check_classes(names, place)


def _unpickle(content: bytes, place: str) -> dict[Any, Any]:
    """Return the dict in a pickle, with text for keys (Python 2 wrote them as bytes)."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _Refused as error:
        raise _error(f"{place} asks for {error}, which no file of CIFAR-10 does; refused") from None
    except Exception as error:  # a broken pickle may fail in any way
        raise _error(
            f"{place} ({len(content):,} bytes) is no whole pickle: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, dict):
        raise _error(f"a file must be a dict, got a {type(value).__name__} in {place}")
    return {_text(key): item for key, item in value.items()}


class _Refused(Exception):
    """A pickle asks for something that it must not have."""


class _Unpickler(pickle.Unpickler):
    """Build numbers, bytes, text, lists, dicts and byte arrays; refuse all other calls."""

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}"
        if asked not in _ADMITTED:
            raise _Refused(asked)
        return _ADMITTED[asked]


_NDARRAY = object()


def _array(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """Return the empty array that a pickle fills; another size could exhaust the memory."""
    if kind is not _NDARRAY or tuple(shape) != (0,):
        raise _Refused(f"an array of shape {shape}")
    return np.ndarray((0,), np.uint8)


def _dtype(word: Any, *flags: Any) -> np.dtype:
    if _text(word) not in ("u1", "|u1", "uint8"):
        raise _Refused(f"the dtype {word!r}")
    return np.dtype(np.uint8, copy=True)


def _latin1(text: Any, encoding: Any) -> bytes:
    """Decode bytes as Python 3 writes them for Python 2."""
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise _Refused(f"the encoding {encoding!r}")
    return text.encode("latin1")


_ADMITTED = {
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.ndarray": _NDARRAY,
    "numpy.dtype": _dtype,
    "_codecs.encode": _latin1,
}


def _text(word: Any) -> Any:
    return word.decode("latin1") if isinstance(word, bytes) else word


# ---------------------------------------------------------------- checks


def _check_size(files, name: str, records: int, exact: bool) -> None:
    """Check a file's size; a pickle adds file names, and may write a byte as two."""
    size, wanted = files.size(name), records * (1 + PIXELS if exact else PIXELS)
    most = wanted if exact else 2 * wanted + 100 * records + 10_000
    if wanted <= size <= most:
        return
    rule = f"{wanted:,}" if exact else f"{wanted:,} to {most:,}"
    word = "cut short" if size < wanted else "too long"
    raise _error(
        f"{name} has {records:,} images, {rule} bytes; {files.place}/{name} has {size:,}: {word}"
    )


def _check_md5(files, name: str, content: bytes, md5: Mapping[str, str]) -> None:
    found = hashlib.md5(content).hexdigest()
    if found != md5.get(name, found):
        raise _error(
            f"{name} has the MD5 {md5[name]}; {files.place}/{name} ({len(content):,} bytes) has "
            f"{found}"
        )


def _check_classes(names: list[Any], place: str) -> None:
    if names != CLASSES:
        raise _error(f"the classes are {', '.join(CLASSES)}; {place} names {names}")


def _labels(labels: np.ndarray, place: str) -> np.ndarray:
    if wrong := sorted({int(label) for label in labels if not 0 <= label <= 9}):
        raise _error(f"labels must lie in 0 … 9, got {', '.join(map(str, wrong[:5]))} in {place}")
    return labels.astype(np.int32)


def _images(rows: np.ndarray) -> np.ndarray:
    """Reshape (n, 3072), channel after channel, to (n, 32, 32, 3)."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
