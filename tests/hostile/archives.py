"""Files and folders that somebody made who means harm: `corpus(folder, flag)` writes them all and yields their paths.

Some are not what they say (zips whose directory lies), some hold hostile pickles in otherwise sound archives.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.hostile import pickles


def archive(pickled: bytes, records: dict[str, bytes] | None = None, prefix: str = "file", **more: bytes) -> bytes:
    """A zip as torch.save lays it out, stored, its checksums right."""
    data = io.BytesIO()
    entries = {
        "data.pkl": pickled,
        "byteorder": b"little",
        **(records or {"data/0": b"\0" * 16}),
        "version": b"3\n",
        **more,
    }
    with zipfile.ZipFile(data, "w") as file:
        for name, content in entries.items():
            file.writestr(f"{prefix}/{name}", content)
    return data.getvalue()


SOUND = pickles.state(pickles.tensor())


def patched(data: bytes, *changes: tuple[int, str, int]) -> bytes:
    """The bytes with numbers replaced: (offset, struct format, value)."""
    changed = bytearray(data)
    for offset, form, value in changes:
        struct.pack_into(form, changed, offset, value)
    return bytes(changed)


def entry_of(data: bytes, name: str) -> int:
    """Where the directory's entry of a record begins."""
    start = struct.unpack("<I", data[-6:-2])[0]
    return data.rindex(f"file/{name}".encode(), start) - 46


def compressed() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(
            "file/data.pkl",
            pickles.state(pickles.tensor((2**26,), where=pickles.storage(count=pickles.integer(2**26)))),
        )
        file.writestr("file/data/0", b"\0" * 2**26)
    return data.getvalue()


def lying_zip64() -> bytes:
    """Sizes in a zip64 field that no file has."""
    data = archive(SOUND)
    at = entry_of(data, "data/0")
    name_length = struct.unpack_from("<H", data, at + 28)[0]
    extra = struct.pack("<HHQQ", 1, 16, 2**50, 2**50)
    made = patched(data, (at + 20, "<I", 2**32 - 1), (at + 24, "<I", 2**32 - 1), (at + 30, "<H", len(extra)))
    end = at + 46 + name_length
    made = made[:end] + extra + made[end:]
    size = struct.unpack_from("<I", made, len(made) - 10)[0]
    return patched(made, (len(made) - 10, "<I", size + len(extra)))


def overlapping(count: int) -> bytes:
    """One block of bytes under `count` names."""
    block = b"\0" * 2**16
    tensors = [
        pickles.tensor((2**14,), where=pickles.storage(pickles.text(str(i)), pickles.integer(2**14)))
        for i in range(count)
    ]
    listed = b"](" + b"".join(tensors) + b"e"
    data = archive(pickles.state(listed), {"data/0": block})
    at, end = entry_of(data, "data/0"), len(data) - 22
    entry = data[at : at + 46 + len("file/data/0")]
    others = b"".join(
        patched(entry, (28, "<H", len(name)))[:46] + name
        for name in (f"file/data/{i}".encode() for i in range(1, count))
    )
    total, size = struct.unpack_from("<H", data, end + 10)[0] + count - 1, struct.unpack_from("<I", data, end + 12)[0]
    made = data[:end] + others + data[end:]
    return patched(
        made, (len(made) - 14, "<H", total), (len(made) - 12, "<H", total), (len(made) - 10, "<I", size + len(others))
    )


def duplicate() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("file/data.pkl", SOUND)
        file.writestr("file/data/0", b"\0" * 16)
        file.writestr("file/data/1", b"\1" * 16)
    return data.getvalue().replace(b"file/data/1", b"file/data/0")


def archives() -> dict[str, bytes]:
    """Zips that lie, or whose records have names that lead elsewhere."""
    sound = archive(SOUND)
    data_0 = entry_of(sound, "data/0")
    found = {
        "a zip bomb": compressed(),
        "zip64 sizes": lying_zip64(),
        "one block of bytes for many": overlapping(1000),
        "the same name twice": duplicate(),
        "a negative place": patched(sound, (len(sound) - 6, "<I", 2**32 - 2)),
        "a record beyond the end": patched(sound, (data_0 + 20, "<I", 2**31), (data_0 + 24, "<I", 2**31)),
        "a record over the directory": patched(sound, (data_0 + 20, "<I", 4000), (data_0 + 24, "<I", 4000)),
        "a record elsewhere": patched(sound, (data_0 + 42, "<I", 7)),
        "an encrypted record": patched(sound, (data_0 + 8, "<H", 1)),
        "a compressed record": patched(sound, (data_0 + 10, "<H", 8)),
        "a directory of 2**31 bytes": patched(sound, (len(sound) - 10, "<I", 2**31)),
        "65535 entries": patched(sound, (len(sound) - 14, "<H", 65535), (len(sound) - 12, "<H", 65535)),
        "a name that climbs": archive(SOUND, {"data/0": b"\0" * 16, "../../../escaped": b"x"}).replace(
            b"file/../../", b"../../../../"
        ),
        "an absolute name": archive(SOUND, {"data/0": b"\0" * 16, "/etc": b"x"}).replace(b"file//etc", b"/tmp/aetc"),
        "a zip in the pickle's place": archive(archive(SOUND)),
        "a pickle in a record that is asked for": archive(
            pickles.state(pickles.tensor(where=pickles.storage(pickles.text("../data.pkl"))))
        ),
        "a byte order of a megabyte": archive(SOUND, byteorder=b"little" * 2**18),
        "big-endian": archive(SOUND, byteorder=b"big"),
        "no pickle": archive(SOUND).replace(b"data.pkl", b"data.pk_"),
        "two trees": archive(SOUND).replace(b"file/byteorder", b"fil_/byteorder"),
    }
    return found


def legacy(flag: str) -> dict[str, bytes]:
    """Files of torch's layout before 1.6, which begin with a pickle."""
    sound = io.BytesIO()
    torch.save({"model": torch.zeros(4)}, sound, _use_new_zipfile_serialization=False)
    data = sound.getvalue()
    return {
        "an old file that is cut": data[:-9],
        "an old file of a huge storage": data.replace(b"K\x04", b"\x8a\x06\0\0\0\0\0\x02"),
        **{f"an old file: {name}": made for name, made in pickles.touching(flag).items()},
        "an old file: a memo of 2**31": pickles.tricks()["a memo of 2**31"],
        "an old file: a bytearray of 2**40": pickles.tricks()["a bytearray of 2**40"],
    }


def files(flag: str) -> dict[str, bytes]:
    """Every hostile file by what is wrong with it. If anything in one were run, `flag` would appear."""
    made = {**archives(), **legacy(flag)}
    for name, pickled in {**pickles.touching(flag), **pickles.tricks()}.items():
        made[f"pickle: {name}"] = archive(pickled)
    return made


# ---- folders


def folders(sound: Path, target: Path, flag: str) -> Iterator[tuple[str, Path]]:
    """Hostile variants of the folder `sound`, which is ours, each in a folder under `target`."""
    metadata = (sound / ".metadata").read_bytes()
    parts = sorted(path.name for path in sound.glob("*.distcp"))
    variants: dict[str, dict[str, bytes | None]] = {
        f".metadata: {name}": {".metadata": made, "fairtrain.pt": None}
        for name, made in {**pickles.touching(flag), **pickles.tricks()}.items()
    }
    climbing = metadata.replace(parts[0].encode(), b"../" + parts[0][3:].encode())
    variants |= {
        "a part that climbs": {".metadata": climbing, "fairtrain.pt": None},
        "the record is a hostile file": {"fairtrain.pt": archive(pickles.touching(flag)["os.system"])},
        "the record is a list": {"fairtrain.pt": archive(b"\x80\x02].")},
        "a part is missing": {parts[0]: None},
    }
    for number, (name, changes) in enumerate(sorted(variants.items())):
        folder = target / str(number)
        shutil.copytree(sound, folder)
        for entry, data in changes.items():
            (folder / entry).unlink()
            if data is not None:
                (folder / entry).write_bytes(data)
        yield name, folder
    yield from records(sound, target, parts)
    pipe = target / "pipe"
    shutil.copytree(sound, pipe)
    (pipe / parts[0]).unlink()
    os.mkfifo(pipe / parts[0])
    yield "a part is a pipe", pipe


def records(sound: Path, target: Path, parts: list[str]) -> Iterator[tuple[str, Path]]:
    """The folder with a `fairtrain.pt` that was changed and saved again, its checksums right."""
    import checkpoint_file

    def lies(record: dict) -> dict[str, dict]:
        chunks = record["chunks"].clone()
        far, negative, other = chunks.clone(), chunks.clone(), chunks.clone()
        far[0, 3], negative[0, 3], other[0, 0] = 2**62, -5, 99
        size = os.path.getsize("/etc/hostname") if os.path.exists("/etc/hostname") else 0
        return {
            "files elsewhere": {"files": [("../../../../../../../../etc/hostname", size, 0)]},
            "an absolute file": {"files": [("/etc/hostname", size, 0)]},
            "files of other kinds": {"files": [7, None]},
            "a chunk far away": {"chunks": far},
            "a chunk before the file": {"chunks": negative},
            "a chunk in no file": {"chunks": other},
            "no chunks": {"chunks": chunks[:0]},
            "other tables": {"chunks": chunks.float()},
            "blocks of nothing": {"block_bytes": 0},
            "blocks of a text": {"block_bytes": "x"},
            "no checksums": {"checksums": record["checksums"][:0]},
            "numbers of no tensor": {"state": {"format_version": 1, "model": {"a": torch.tensor(10**9)}}},
            "a number that is a table": {"state": {"format_version": 1, "model": {"a": torch.zeros(3)}}},
            "tensors of other kinds": {"tensors": [7]},
            "strides of other kinds": {"tensors": [(name, ["x"]) for name, _ in record["tensors"]]},
            "names of no tensor": {"tensors": [("nowhere", stride) for _, stride in record["tensors"]]},
        }

    record = checkpoint_file_record(sound)
    for number, (name, changes) in enumerate(lies(record).items()):
        folder = target / f"record{number}"
        shutil.copytree(sound, folder)
        (folder / "fairtrain.pt").unlink()
        checkpoint_file.write_checkpoint_file({**record, **changes}, folder / "fairtrain.pt")
        yield f"fairtrain.pt: {name}", folder


def checkpoint_file_record(folder: Path) -> dict:
    return torch.load(folder / "fairtrain.pt", weights_only=True)


def repaired(data: bytes) -> bytes:
    """The zip with the checksums of its records put right, so that a mutation reaches what stands behind them."""
    made = bytearray(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries, start = file.infolist(), file.start_dir
    except Exception:  # what a mutation made of it is no zip
        return data
    at = start
    for entry in entries:
        header = made[entry.header_offset : entry.header_offset + 30]
        if len(header) == 30:
            begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
            crc = zlib.crc32(bytes(made[begin : begin + min(entry.file_size, len(made))]))
            struct.pack_into("<I", made, at + 16, crc)
            struct.pack_into("<I", made, entry.header_offset + 14, 0 if header[6] & 8 else crc)
        at += 46 + len(entry.orig_filename.encode()) + len(entry.extra) + len(entry.comment)
        if at > len(made):
            break
    return bytes(made)


def pickled(value) -> bytes:
    return pickle.dumps(value, 2)
