"""CIFAR-10's readers on small files in the published formats, and the files that they refuse."""

import hashlib
import os
import pickle
import shutil
import struct
import tarfile

import cifar
import numpy as np
import pytest

RECORDS = 20
NAMES = [*cifar.TRAIN, "test_batch"]
FORMS = ("binary", "python", "python 3")


def batch(name):
    """Return pixels (n, 3072) and labels of one file, different in each."""
    rng = np.random.default_rng(NAMES.index(name))
    return rng.integers(0, 256, (RECORDS, 3072), np.uint8), rng.integers(0, 10, RECORDS)


def as_binary(data, labels):
    return np.hstack([labels[:, None].astype(np.uint8), data]).tobytes()


def as_python(data, labels, dtype=b"u1"):
    """Return the bytes that Python 2 would pickle, which Python 3 cannot write."""
    text = lambda word: b"U" + bytes([len(word)]) + word  # noqa: E731
    number = lambda n: b"J" + struct.pack("<i", n)  # noqa: E731
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\n" + text(dtype) + b"K\x00K\x01\x87R"
    kind += b"(K\x03U\x01|NNN" + number(-1) * 2 + b"K\x00tb"
    shape = number(data.shape[0]) + number(data.shape[1]) + b"\x86"
    content = b"T" + struct.pack("<i", data.nbytes) + data.tobytes()
    array += b"(K\x01" + shape + kind + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def as_python_3(data, labels):
    whole = {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": data}
    return pickle.dumps(whole, protocol=2)


def write(folder, form):
    """Write the files of one version into the folder that its archive unpacks to."""
    inner = folder / cifar.FOLDERS[form != "binary"]
    inner.mkdir(parents=True)
    encode = {"binary": as_binary, "python": as_python, "python 3": as_python_3}[form]
    for name in NAMES:
        (inner / (name + (".bin" if form == "binary" else ""))).write_bytes(encode(*batch(name)))
    if form == "binary":
        (inner / "batches.meta.txt").write_text("\n".join(cifar.CLASSES) + "\n\n")
    else:
        names = [name.encode() for name in cifar.CLASSES]
        (inner / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))
    return inner


def pack(folder, inner):
    path = folder / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inner, inner.name)
    return path


def read(path, records=RECORDS, md5=()):
    return cifar.read_cifar(path, records=records, md5=dict(md5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["folder", "folder around it", "archive"])
def test_all_forms_give_the_same_images(form, place, tmp_path):
    inner = write(tmp_path, form)
    path = {"folder": inner, "folder around it": tmp_path, "archive": None}[place]
    images = read(path or pack(tmp_path, inner))
    assert images.train_x.shape == (5 * RECORDS, 32, 32, 3) and images.train_x.dtype == np.uint8
    assert images.test_x.shape == (RECORDS, 32, 32, 3) and images.test_y.dtype == np.int32
    for i, name in enumerate(NAMES):
        data, labels = batch(name)
        part = slice(i * RECORDS, (i + 1) * RECORDS)
        train = images.train_x[part], images.train_y[part]
        x, y = (images.test_x, images.test_y) if name == "test_batch" else train
        assert np.array_equal(y, labels)
        # Colour c of row r, column k is byte 1024 c + 32 r + k.
        assert np.array_equal(x[:, 3, 7, 1], data[:, 1024 + 3 * 32 + 7])
        assert np.array_equal(x[..., 2].reshape(RECORDS, -1), data[:, 2048:])


def test_checksums_are_compared(tmp_path):
    inner = write(tmp_path, "python")
    path = pack(tmp_path, inner)
    found = hashlib.md5(path.read_bytes()).hexdigest()
    assert read(path, md5={"cifar-10-python.tar.gz": found}).train_x.any()
    name = "data_batch_2"
    found = hashlib.md5((inner / name).read_bytes()).hexdigest()
    assert read(inner, md5={name: found}).train_x.any()
    assert set(cifar.MD5) == {*cifar.ARCHIVES, *NAMES}
    with pytest.raises(ValueError, match=f"data_batch_1 has the MD5 {cifar.MD5['data_batch_1']};"):
        read(inner, md5=cifar.MD5)
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz with the MD5 .* bytes\) has "):
        read(path, md5=cifar.MD5)


def test_published_counts_are_the_default(tmp_path):
    with pytest.raises(ValueError, match=r"10,000 images, 30,730,000 bytes; .* has 61,460: cut"):
        cifar.read_cifar(write(tmp_path, "binary"))


def change(name, edit):
    """A change of one file, as a test case."""
    return lambda inner: (inner / name).write_bytes(edit((inner / name).read_bytes()))


def labelled(name, encode, label):
    data, labels = batch(name)
    return encode(data, np.where(np.arange(RECORDS) == 3, label, labels))


@pytest.mark.parametrize(
    ("form", "damage", "text"),
    [
        ("binary", change("data_batch_2.bin", lambda b: b[:-1]),
         r"data_batch_2.bin has 20 images, 61,460 bytes; .*data_batch_2.bin has 61,459: cut short"),
        ("binary", change("test_batch.bin", lambda b: b + b[:3073]), "has 64,533: too long"),
        ("binary", change("data_batch_3.bin", lambda _: labelled("data_batch_3", as_binary, 77)),
         r"labels must lie in 0 … 9, got 77 in .*data_batch_3.bin"),
        ("binary", change("batches.meta.txt", lambda b: b.replace(b"frog", b"toad")),
         "the classes are airplane, .*'toad'"),
        ("binary", lambda inner: (inner / "data_batch_5.bin").unlink(), "_5.bin is missing"),
        ("binary", lambda inner: (inner / "batches.meta.txt").unlink(), "meta.txt is missing"),
        ("binary", lambda inner: [f.unlink() for f in inner.iterdir()],
         "has neither data_batch_1.bin nor data_batch_1"),
        ("binary", shutil.rmtree, "no such file or folder"),
        ("python", change("data_batch_1", lambda b: b[:-50]),
         r"data_batch_1 \(.* bytes\) is no whole pickle"),
        ("python", change("data_batch_1", lambda b: b[:1000]), "has 1,000: cut short"),
        ("python", change("data_batch_1", lambda b: b + bytes(90_000)), "too long"),
        ("python", change("data_batch_4", lambda _: labelled("data_batch_4", as_python, -1)),
         "labels must lie in 0 … 9, got -1 in .*data_batch_4"),
        ("python", change("data_batch_1", lambda _: as_python(batch(NAMES[0])[0], range(19))),
         "labels is a list of 20; in .*data_batch_1 a list of 19"),
        ("python", change("data_batch_1", lambda _: as_python(
            batch(NAMES[0])[0].reshape(40, 1536), range(9))),
         r"data is uint8\[20, 3072\]; in .*data_batch_1 it is uint8\[40, 1536\]"),
        ("python", change("batches.meta", lambda _: pickle.dumps({b"label_names": [b"cat"]}, 2)),
         r"the classes are airplane, .* names \['cat'\]"),
        ("python", change("batches.meta", lambda _: pickle.dumps([1], 2)),
         "must be a dict, got a list in "),
        ("python", lambda inner: (inner / "batches.meta").unlink(), "batches.meta is missing"),
    ],
)  # fmt: skip
def test_damage_is_named(form, damage, text, tmp_path):
    inner = write(tmp_path, form)
    damage(inner)
    with pytest.raises(ValueError, match=text) as error:
        read(inner)
    assert str(inner) in str(error.value) and str(error.value).endswith(cifar.PAGE)


class Trap:
    """Create a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (lambda trap: pickle.dumps({"labels": Trap(trap)}, 2), "mkdir"),
        (lambda trap: pickle.dumps({"labels": Trap(trap)}, 4), "mkdir"),
        (lambda _: pickle.dumps(eval, 2), "eval"),
        # With the allowed names: an array of any size, an array of objects, another codec.
        (lambda _: b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            b"J\xff\xff\xff\x7f\x85U\x01b\x87R.", "an array of shape"),
        (lambda _: as_python(*batch(NAMES[0]), dtype=b"O8"), "the dtype b'O8'"),
        (lambda _: b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
         "the encoding 'rot13'"),
    ],
)  # fmt: skip
def test_pickles_run_nothing(content, word, tmp_path):
    inner, trap = write(tmp_path, "python"), tmp_path / "trap"
    (inner / "batches.meta").write_bytes(content(trap))
    with pytest.raises(ValueError, match=f"batches.meta asks for .*{word}.*; refused"):
        read(inner)
    assert not trap.exists()


def test_an_array_s_class_is_not_called(tmp_path):
    inner = write(tmp_path, "python")
    call = b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R."
    (inner / "batches.meta").write_bytes(call)
    with pytest.raises(ValueError, match="batches.meta .* is no whole pickle: TypeError"):
        read(inner)


def test_broken_archives(tmp_path):
    inner = write(tmp_path, "binary")
    path = pack(tmp_path, inner)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cifar.tar.gz cannot be unpacked"):
        read(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cifar.tar.gz cannot be unpacked"):
        read(path)
    (inner / "data_batch_4.bin").unlink()
    with pytest.raises(ValueError, match=r"cifar.tar.gz has no data_batch_4.bin"):
        read(pack(tmp_path, inner))
    (inner / "data_batch_1.bin").unlink()
    with pytest.raises(ValueError, match=r"cifar.tar.gz has neither data_batch_1.bin nor"):
        read(pack(tmp_path, inner))
