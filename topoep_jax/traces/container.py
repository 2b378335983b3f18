"""A zip file of NumPy arrays that grows entry by entry, is readable up to where it was cut off, and can go on there.

Python's zipfile finds entries through the directory at the end, which a process that dies does not write. So entries
are written here with all sizes in front of them, and found by walking from one to the next where there is no directory.
Format: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3.
"""

import io
import struct
import tokenize
import zipfile
import zlib
from typing import IO

import numpy as np

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION, _JANUARY_1980 = 45, 33
_MAX_16, _MAX_32 = 2**16 - 1, 2**32 - 1
MAX_BYTES = 2**31 - 1
"""Most bytes of one array."""


class DamagedError(ValueError):
    """Bytes that no writer wrote."""


def write(file: IO[bytes], name: str, array: np.ndarray) -> zipfile.ZipInfo:
    """Appends an array as `name`.npy, and hands it to the operating system.

    Raises:
      ValueError: it has more than `MAX_BYTES`.
    """
    if array.nbytes > MAX_BYTES:
        raise ValueError(f"an array of {array.nbytes:,} bytes is too large for an entry: split the microbatch")
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    raw = buffer.getbuffer()
    # Indices hardly repeat: a higher level takes several times as long for 1 or 2 % of the size.
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = deflate.compress(raw) + deflate.flush()
    info = zipfile.ZipInfo(f"{name}.npy")
    info.compress_type, info.header_offset = zipfile.ZIP_DEFLATED, file.tell()
    info.CRC, info.compress_size, info.file_size = zlib.crc32(raw), len(packed), len(raw)
    encoded = info.filename.encode()
    sizes = info.CRC, info.compress_size, info.file_size
    head = _LOCAL.pack(b"PK\3\4", _VERSION, 0, zipfile.ZIP_DEFLATED, 0, _JANUARY_1980, *sizes, len(encoded), 0)
    file.write(head + encoded + packed)
    file.flush()
    return info


def finish(file: IO[bytes], infos: list[zipfile.ZipInfo]) -> None:
    """Writes the directory of all entries, in the 64-bit form where counts or offsets need it."""
    start = file.tell()
    for info in infos:
        offset, extra = info.header_offset, b""
        if offset >= _MAX_32:
            offset, extra = _MAX_32, struct.pack("<HHQ", 1, 8, offset)
        name = info.filename.encode()
        sizes = info.CRC, info.compress_size, info.file_size, len(name), len(extra)
        fields = (_VERSION, _VERSION, 0, info.compress_type, 0, _JANUARY_1980, *sizes, 0, 0, 0, 0, offset)
        file.write(_CENTRAL.pack(b"PK\1\2", *fields) + name + extra)
    end = file.tell()
    count, size = len(infos), end - start
    if count >= _MAX_16 or max(size, start) >= _MAX_32:
        file.write(_END64.pack(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start))
        file.write(_LOCATOR64.pack(b"PK\6\7", 0, end, 1))
    count, size, start = min(count, _MAX_16), min(size, _MAX_32), min(start, _MAX_32)
    file.write(_END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0))
    file.flush()


def find(file: IO[bytes]) -> tuple[list[zipfile.ZipInfo], bool]:
    """The entries of a file, and whether it was cut off: then those that are whole.

    Raises:
      DamagedError: it is not a zip file, nor the beginning of one that `write` made; or its directory lists others.
    """
    try:
        with zipfile.ZipFile(file) as whole:
            listed = whole.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return walk(file), True
    try:
        there = walk(file)
    except DamagedError:
        return listed, False  # Another program packed it.
    if [(i.filename, i.header_offset) for i in listed] != [(i.filename, i.header_offset) for i in there]:
        raise DamagedError("its directory does not list the arrays that are there")
    return listed, False


def walk(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """Every whole entry that `write` made, from the beginning up to a directory or the end of the file.

    Raises:
      DamagedError: something else lies between them.
    """
    length, offset = file.seek(0, io.SEEK_END), 0
    found: list[zipfile.ZipInfo] = []
    while True:
        file.seek(offset)
        head = file.read(_LOCAL.size)
        if not b"PK\3\4".startswith(head[:4]):
            if found and b"PK\1\2".startswith(head[:4]):
                return found
            raise DamagedError(f"byte {offset} begins neither an array nor the directory of a zip file")
        if len(head) < _LOCAL.size:
            return found
        _, _, flags, method, _, _, crc, packed, size, len_name, len_extra = _LOCAL.unpack(head)
        end = offset + _LOCAL.size + len_name + len_extra + packed
        if flags or method != zipfile.ZIP_DEFLATED or len_extra or max(packed, size) == _MAX_32:
            raise DamagedError(f"the entry at byte {offset} was not written by a TraceWriter")
        if end > length:
            return found
        info = zipfile.ZipInfo(file.read(len_name).decode(errors="replace"))
        info.compress_type, info.header_offset = method, offset
        info.CRC, info.compress_size, info.file_size = crc, packed, size
        found.append(info)
        offset = end


def begins_with(file: IO[bytes], name: str) -> bool:
    """Whether the first entry, of which no more than the name needs to be there, is called so."""
    file.seek(_LOCAL.size)
    encoded = f"{name}.npy".encode()
    return file.read(len(encoded)) == encoded


def end_of(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Offset of the first byte after an entry."""
    return _start_of(file, info) + info.compress_size


def read(file: IO[bytes], info: zipfile.ZipInfo) -> np.ndarray:
    """The array of an entry.

    Raises:
      DamagedError: its bytes are not those that were written, or are no array.
    """
    file.seek(_start_of(file, info))
    packed = file.read(info.compress_size)
    try:
        if info.compress_type == zipfile.ZIP_DEFLATED:
            packed = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, info.file_size + 1)
        if len(packed) != info.file_size or zlib.crc32(packed) != info.CRC:
            raise DamagedError("its checksum is wrong")
        return np.lib.format.read_array(io.BytesIO(packed), allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, MemoryError, zlib.error) as error:
        raise DamagedError(f"{info.filename} is damaged: {error}") from error


def _start_of(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Offset of an entry's data: behind its name, and fields that may differ from those in the directory."""
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        raise DamagedError(f"{info.filename} is damaged: it begins beyond the end of the file")
    *_, len_name, len_extra = _LOCAL.unpack(head)
    if file.read(len_name) != info.filename.encode():
        raise DamagedError(f"{info.filename} is damaged: another entry is where it should be")
    return info.header_offset + _LOCAL.size + len_name + len_extra
