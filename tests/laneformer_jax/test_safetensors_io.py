import json
import mmap
import os
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_header import DTYPES
from laneformer_jax.safetensors_io import SafetensorsFile, SafetensorsFolder, SafetensorsWriter

GOLDEN = Path(__file__).parents[1] / "golden"

# NaNs with payloads, both infinities, -0.0, the smallest subnormal, 1.0; as bit patterns.
SPECIAL_BITS = {
    "F64": (np.uint64, [0x7FF8000000000123, 0xFFF0000000000ABC, 0x7FF0000000000000, 1 << 63, 1, 0x3FF0000000000000]),
    "F32": (np.uint32, [0x7FC01234, 0xFF800001, 0x7F800000, 0x80000000, 1, 0x3F800000]),
    "F16": (np.uint16, [0x7E01, 0xFC01, 0x7C00, 0x8000, 1, 0x3C00]),
    "BF16": (np.uint16, [0x7FC1, 0xFF81, 0x7F80, 0x8000, 1, 0x3F80]),
    "F8_E4M3": (np.uint8, [0x7F, 0xFF, 0x7E, 0x80, 1, 0x38]),
    "F8_E5M2": (np.uint8, [0x7D, 0xFE, 0x7C, 0x80, 1, 0x3C]),
}


def example_tensors() -> dict[str, np.ndarray]:
    """One tensor of every dtype, bits of every kind, an empty one and a scalar."""
    rng = np.random.default_rng(0)
    tensors = {}
    for code, dtype in DTYPES.items():
        if code in SPECIAL_BITS:
            unsigned, bits = SPECIAL_BITS[code]
            tensors[code] = np.array(bits, unsigned).view(dtype).reshape(2, 3)
        elif code == "BOOL":
            tensors[code] = np.array([[True, False, True]])
        else:
            tensors[code] = rng.integers(0, 256, (3, 5 * dtype.itemsize), np.uint8).view(dtype)
    return tensors | {"empty": np.zeros((0, 4), np.float32), "scalar": np.array(2.5, np.float64)}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    with SafetensorsWriter(path, {name: (array.dtype, array.shape) for name, array in tensors.items()}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    return path


def split(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def fault(path: Path, opener=SafetensorsFile.open) -> str:
    """The one line that opening `path` gives; it has to begin with a path in the same folder, or the folder."""
    with pytest.raises(LaneformerError) as caught:
        opener(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of two shards with their index, and a stray file."""
    write(tmp_path / "model-1.safetensors", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    write(tmp_path / "model-2.safetensors", {"b": np.ones(3, ml_dtypes.bfloat16), "c": np.zeros(1, np.int8)})
    write(tmp_path / "stray.safetensors", {"a": np.zeros(1, np.int8), "z": np.zeros(1, np.int8)})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class TestReading:
    def test_reads_what_the_official_package_wrote(self, tmp_path: Path):
        tensors = example_tensors()
        safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"made by": "official"})
        file = SafetensorsFile.open(tmp_path / "x.safetensors")
        assert file.metadata == {"made by": "official"}
        assert file.entries.keys() == tensors.keys()
        for name, array in tensors.items():
            assert_same_bits(file.read(name), array)

    @pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/")), ids=lambda folder: folder.name)
    def test_reads_the_goldens_as_the_official_package_does(self, folder: Path):
        ours = SafetensorsFolder.open(folder)
        official = safetensors.numpy.load_file(folder / "model.safetensors")
        assert ours.entries.keys() == official.keys()
        for name, array in official.items():
            assert_same_bits(ours.read(name), array)

    def test_read_is_a_read_only_view_of_the_mapped_file(self, tmp_path: Path):
        array = SafetensorsFile.open(write(tmp_path / "x.safetensors", {"a": np.arange(5.0)})).read("a")
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        base = array
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)

    def test_read_slice_fetches_one_lane_of_a_tensor_bigger_than_memory(self, tmp_path: Path):
        terabyte = 1 << 40
        header = {"w": {"dtype": "BF16", "shape": [8, terabyte // 16], "data_offsets": [0, terabyte]}}
        data = join(header, b"")
        path = tmp_path / "x.safetensors"
        with path.open("wb") as file:
            file.write(data)
            file.truncate(len(data) + terabyte)  # a hole: it takes no disk space
            file.seek(len(data) + 3 * terabyte // 8)
            file.write(np.array([1, 2, 3], ml_dtypes.bfloat16).tobytes())
        lane = SafetensorsFile.open(path).read_slice("w", (3, slice(0, 4)))
        assert lane.tolist() == [1, 2, 3, 0] and lane.dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize("index", [1, slice(1, 3), (slice(None), 2), (2, slice(None, None, 2)), (0, 0)])
    def test_read_slice_equals_indexing(self, tmp_path: Path, index):
        array = np.arange(12, dtype=np.int32).reshape(3, 4)
        file = SafetensorsFile.open(write(tmp_path / "x.safetensors", {"a": array}))
        assert_same_bits(file.read_slice("a", index), np.asarray(array[index]))

    def test_unaligned_tensors(self, tmp_path: Path):
        arrays = {"a": np.array([7], np.uint8), "b": np.array([1.5, -2.25], np.float64)}
        header = {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F64", "shape": [2], "data_offsets": [1, 17]},
        }
        path = tmp_path / "x.safetensors"
        path.write_bytes(join(header, arrays["a"].tobytes() + arrays["b"].tobytes()))
        for name, array in arrays.items():
            assert_same_bits(SafetensorsFile.open(path).read(name), array)

    def test_absent_tensor_and_file_that_changed(self, tmp_path: Path):
        path = write(tmp_path / "x.safetensors", {"a": np.zeros(4)})
        file = SafetensorsFile.open(path)
        with pytest.raises(LaneformerError, match="x.safetensors: has no tensor 'b'"):
            file.read("b")
        with path.open("ab") as grown:
            grown.write(b"!")
        with pytest.raises(LaneformerError, match="x.safetensors: changed while it was being read"):
            file.read("a")


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
FAULTY_HEADERS = {
    "overlap": ({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, 6, "tensor 'b' overlaps tensor 'a'"),
    "same bytes": ({"a": ONE, "b": ONE}, 4, "tensor 'b' overlaps tensor 'a'"),
    "gap": ({"a": ONE, "b": {**ONE, "data_offsets": [6, 10]}}, 10, "gap of 2 bytes between tensor 'a' and tensor 'b'"),
    "gap at the start": ({"a": {**ONE, "data_offsets": [1, 5]}}, 5, "gap of 1 bytes between the header and"),
    "bytes left over": ({"a": ONE}, 5, "has 1 bytes behind tensor 'a'"),
    "out of range": ({"a": {**ONE, "shape": [9], "data_offsets": [0, 9]}}, 4, "is cut, or wrong: tensor 'a' ends at"),
    "falling offsets": ({"a": {**ONE, "data_offsets": [4, 0]}}, 4, "data_offsets [4, 0], not two rising"),
    "negative offset": ({"a": {**ONE, "data_offsets": [-4, 0]}}, 4, "data_offsets [-4, 0], not two rising"),
    "three offsets": ({"a": {**ONE, "data_offsets": [0, 4, 4]}}, 4, "not two rising whole numbers"),
    "offset no number": ({"a": {**ONE, "data_offsets": [0, "4"]}}, 4, "not two rising whole numbers"),
    "offset 4.0": ({"a": {**ONE, "data_offsets": [0, 4.0]}}, 4, "not two rising whole numbers"),
    "offset true": ({"a": {**ONE, "shape": [1], "data_offsets": [0, True]}}, 1, "not two rising whole numbers"),
    "offset 2**64": ({"a": {**ONE, "data_offsets": [2**64, 2**64 + 4]}}, 4, "not two rising whole numbers"),
    "size mismatch": ({"a": {**ONE, "shape": [5]}}, 4, "of U8 [5] needs 5 bytes, but its offsets span 4"),
    "dtype mismatch": ({"a": {**ONE, "dtype": "F64"}}, 4, "of F64 [4] needs 32 bytes, but its offsets span 4"),
    "negative shape": ({"a": {**ONE, "shape": [-2, -2]}}, 4, "impossible shape [-2, -2]"),
    "shape not a list": ({"a": {**ONE, "shape": 4}}, 4, "impossible shape 4"),
    "shape true": ({"a": {**ONE, "shape": [True, 4]}}, 4, "impossible shape [True, 4]"),
    "huge shape": ({"a": {**ONE, "shape": [10**30]}}, 4, "impossible shape"),
    "overflow": ({"a": {**ONE, "shape": [2**62, 2**2 + 1]}}, 4, "absurd shape"),
    "overflow to 4": ({"a": {**ONE, "shape": [2**32, 2**32 + 4]}}, 4, "absurd shape"),
    "overflow times 0": ({"a": {**ONE, "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}}, 0, "absurd shape"),
    "rank 1000": ({"a": {**ONE, "shape": [4, *[1] * 1000]}}, 4, "impossible shape"),
    "unknown dtype": ({"a": {**ONE, "dtype": "Q4"}}, 4, "unknown dtype 'Q4'"),
    "dtype a list": ({"a": {**ONE, "dtype": ["U8"]}}, 4, "unknown dtype ['U8']"),
    "field missing": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "must have exactly dtype, shape and data_offsets"),
    "field unknown": ({"a": {**ONE, "stride": [1]}}, 4, "must have exactly dtype, shape and data_offsets"),
    "entry a list": ({"a": [0, 4]}, 4, "must have exactly"),
    "metadata a list": ({"a": ONE, "__metadata__": []}, 4, "__metadata__ must map strings to strings"),
    "metadata of numbers": ({"a": ONE, "__metadata__": {"n": 1}}, 4, "__metadata__ must map strings to strings"),
    "line break in a name": ({"a\nb": {**ONE, "dtype": "Q4"}}, 4, r"tensor 'a\nb'"),
    "endless name": ({"a" * 10**6: {**ONE, "dtype": "Q4"}}, 4, "unknown dtype"),
    "header a list": ([ONE], 4, "does not begin with a brace"),
    "leading space": (b' {"a": 1}', 4, "does not begin with a brace"),
    "no JSON": (b'{"a": ', 4, "header is not valid JSON"),
    "NaN": (b'{"a": NaN}', 4, "header is not valid JSON (NaN is not JSON)"),
    "5000 digits": (b'{"a": %s}' % (b"9" * 5000), 4, "header is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 4, "header is not UTF-8"),
    "half a surrogate pair": (rb'{"\ud800": 1}', 4, "header is not UTF-8"),
    "half a surrogate pair in metadata": (rb'{"__metadata__": {"a": "\ud800"}}', 0, "header is not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16-le"), 4, "header is not valid JSON"),
    "deep nesting": (b'{"a":' + b"[" * 10**5, 4, "header is nested too deeply"),
    "tensor twice": (b'{"a": 1, "a": 1}', 4, "header is not valid JSON ('a' stands there twice)"),
    "field twice": (b'{"a": {"dtype": "U8", "dtype": "U8"}}', 4, "'dtype' stands there twice"),
    "metadata twice": (b'{"__metadata__": {}, "__metadata__": {}}', 4, "'__metadata__' stands there twice"),
}


class TestHostileFiles:
    @pytest.mark.parametrize("case", FAULTY_HEADERS)
    def test_header(self, tmp_path: Path, case: str):
        header, body_size, expected = FAULTY_HEADERS[case]
        path = tmp_path / "x.safetensors"
        path.write_bytes(join(header, bytes(body_size)))
        assert expected in fault(path)

    @pytest.mark.parametrize(
        "data, expected",
        [
            (b"", "is empty"),
            (b"\x10\0\0", "is cut within its header, at byte 3"),
            (join({"a": ONE}, b"")[:30], "is cut within its header, at byte 30"),
            (join({"a": ONE}, b"123"), "is cut, or wrong: tensor 'a' ends at byte"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
            ((2**63).to_bytes(8, "little") + b"{}", "its header would be 9223372036854775808 bytes long"),
            ((10**8 + 1).to_bytes(8, "little") + b"{}", "its header would be 100000001 bytes long"),
            (b"PK\x03\x04\x00\x00\x08\x08" + b"archive/data.pkl", "is no safetensors file"),
            (b"<!DOCTYPE html>", "is no safetensors file"),
        ],
    )
    def test_file(self, tmp_path: Path, data: bytes, expected: str):
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        assert expected in fault(path)

    def test_no_regular_file(self, tmp_path: Path):
        assert "is missing" in fault(tmp_path / "none.safetensors")
        assert "is missing" in fault(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path / "gone")
        assert "broken link" in fault(tmp_path / "link")
        os.mkfifo(tmp_path / "pipe")  # opening it would wait forever
        assert "is missing" in fault(tmp_path / "pipe")

    def test_thousands_of_mutations_load_equal_or_give_one_line(self, tmp_path: Path):
        path = write(tmp_path / "x.safetensors", example_tensors())
        original = path.read_bytes()
        rng = random.Random(0)
        loaded = refused = 0
        for number in range(3000):
            data = mutate(original, rng)
            path.write_bytes(data)
            official = official_bytes(data)
            try:
                file = SafetensorsFile.open(path)
                ours = {name: file.read(name) for name in file.entries}
            except LaneformerError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
                refused += 1
                continue
            loaded += 1
            assert official is not None, f"mutation {number} is refused by the official reader"
            assert {name: (list(a.shape), a.tobytes()) for name, a in ours.items()} == official, f"mutation {number}"
        assert loaded > 200 and refused > 1500


def official_bytes(data: bytes) -> dict[str, tuple[list[int], bytes]] | None:
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (info["shape"], bytes(info["data"])) for name, info in tensors}


NASTY = [0, 1, -1, 3, 2**31, 2**32, 2**63, 2**64, 10**25, 1.0, 1e30, True, None, "", "F32", "BF16", "U8", "\0", "é"]
NASTY += [[], {}, [0], [0, 0], [4, 4], [-1, 3], [2**62, 4], [1] * 40, [[1]], {"a": 1}]


def mutate(original: bytes, rng: random.Random) -> bytes:
    """`original` with a random fault: bytes flipped, cut, inserted, removed, or a field of the header replaced."""
    data = bytearray(original)
    start = rng.randrange(len(data))
    if rng.random() < 0.6:  # most bytes belong to the tensors, most faults to the header
        start = rng.randrange(8 + int.from_bytes(data[:8], "little"))
    kind = rng.randrange(7)
    if kind == 0:
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[start] = rng.choice(b'{}[]",:0123456789 -\\\0\xff')
    elif kind == 2:
        del data[start:]
    elif kind == 3:
        del data[start : start + rng.randrange(1, 9)]
    elif kind == 4:
        data[start:start] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 5:
        data[rng.randrange(8)] = rng.randrange(256)
    else:
        return edit_header(original, rng)
    return bytes(data)


def edit_header(original: bytes, rng: random.Random) -> bytes:
    header, body = split(original)
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(list(header))
        edit = rng.randrange(6)
        if edit == 0:
            header[rng.choice(["new", "", "__metadata__", "é"])] = header.pop(name)
        elif edit == 4:
            header["copy"] = header[name]  # two tensors of the same bytes
        elif edit == 1:
            header[name] = rng.choice(NASTY)
        elif edit == 2 and isinstance(header[name], dict):
            header[name][rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(NASTY)
        elif edit == 3 and isinstance(header[name], dict) and isinstance(header[name].get("shape"), list):
            rng.shuffle(header[name]["shape"])
        else:
            del header[name]
    rest = body + rng.randbytes(rng.choice([0, 0, 0, 1, 8]))
    return join(header, rest)


class TestFolder:
    def test_reads_indexed_shards_only(self, sharded: Path):
        folder = SafetensorsFolder.open(sharded)
        assert folder.entries.keys() == {"a", "b", "c"}
        assert folder.entries["b"].file == sharded / "model-2.safetensors"
        assert folder.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert folder.read_slice("a", 1).tolist() == [3, 4, 5]
        assert folder.read("b").dtype == ml_dtypes.bfloat16
        with pytest.raises(LaneformerError, match="has no tensor 'z'"):
            folder.read("z")

    def test_index_goes_before_a_stray_single_file(self, sharded: Path):
        write(sharded / "model.safetensors", {"old": np.zeros(1)})
        assert "old" not in SafetensorsFolder.open(sharded).entries

    def test_links_of_the_hub_cache(self, sharded: Path, tmp_path_factory: pytest.TempPathFactory):
        blobs = tmp_path_factory.mktemp("blobs")
        for file in list(sharded.iterdir()):
            file.rename(blobs / file.name)
            file.symlink_to(os.path.relpath(blobs / file.name, sharded))
        assert SafetensorsFolder.open(sharded).read("a").shape == (2, 3)

    def test_missing_shards(self, sharded: Path):
        (sharded / "model-2.safetensors").unlink()
        message = fault(sharded, SafetensorsFolder.open)
        assert "index.json: puts tensor 'b' in 'model-2.safetensors', which is missing: download" in message
        (sharded / "model-1.safetensors").rename(sharded / "gone")
        (sharded / "model-1.safetensors").symlink_to(sharded / "nowhere")
        assert "'a' in 'model-1.safetensors', which is missing (and 1 more" in fault(sharded, SafetensorsFolder.open)

    def test_shard_lacks_a_tensor(self, sharded: Path):
        write_index(sharded, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
        message = fault(sharded, SafetensorsFolder.open)
        assert "'model-1.safetensors' lacks tensor 'b', which model.safetensors.index.json puts there" in message

    def test_one_name_in_two_shards(self, sharded: Path):
        write(sharded / "model-2.safetensors", {"a": np.zeros(1), "b": np.zeros(1), "c": np.zeros(1)})
        message = fault(sharded, SafetensorsFolder.open)
        assert "tensor 'a' is in both 'model-1.safetensors' and 'model-2.safetensors'" in message

    def test_cut_shard(self, sharded: Path):
        path = sharded / "model-2.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert "model-2.safetensors: is cut, or wrong: tensor 'c'" in fault(sharded, SafetensorsFolder.open)

    @pytest.mark.parametrize(
        "value",
        ["/etc/model.safetensors", "../model-1.safetensors", "x/../../m.safetensors", "..\\m.safetensors"]
        + ["C:m.safetensors", "a\0.safetensors", "pytorch_model.bin", "", ".", 3, None, ["model-1.safetensors"]],
    )
    def test_index_value_refused(self, sharded: Path, value: object):
        write_index(sharded, {"a": value})
        message = fault(sharded, SafetensorsFolder.open)
        assert "index.json: puts tensor 'a' in " in message
        assert any(reason in message for reason in ("outside the folder", "no .safetensors file", "no file name"))

    @pytest.mark.parametrize(
        "text, expected",
        [
            ("", "is not valid JSON"),
            ("[]", "is not a JSON object"),
            ("{}", "has no weight_map"),
            ('{"weight_map": {}}', "has no weight_map"),
            ('{"weight_map": ["a"]}', "has no weight_map"),
            (
                '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}',
                "is not valid JSON ('a' stands",
            ),
        ],
    )
    def test_faulty_index(self, sharded: Path, text: str, expected: str):
        (sharded / "model.safetensors.index.json").write_text(text)
        assert f"index.json: {expected}" in fault(sharded, SafetensorsFolder.open)

    def test_pickles_are_never_opened(self, tmp_path: Path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        (tmp_path / "pytorch_model.bin").chmod(0)
        assert "only pickled weights (pytorch_model.bin), which are never opened" in fault(
            tmp_path, SafetensorsFolder.open
        )

    def test_no_weights(self, tmp_path: Path):
        assert "has no weights" in fault(tmp_path, SafetensorsFolder.open)
        assert "is missing" in fault(tmp_path / "none", SafetensorsFolder.open)
        assert "is not a folder" in fault(write(tmp_path / "x.safetensors", {}), SafetensorsFolder.open)


class TestWriting:
    def test_the_official_package_reads_what_we_wrote(self, tmp_path: Path):
        tensors = example_tensors()
        path = write(tmp_path / "x.safetensors", tensors)
        official = official_bytes(path.read_bytes())
        assert official == {name: (list(array.shape), array.tobytes()) for name, array in tensors.items()}
        with safetensors.safe_open(path, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert opened.get_tensor("F32").view(np.uint32).ravel().tolist() == SPECIAL_BITS["F32"][1]
        file = SafetensorsFile.open(path)
        for name, array in tensors.items():
            assert_same_bits(file.read(name), array)
            assert file.entries[name].start % array.dtype.itemsize == 0

    @pytest.mark.parametrize(
        "view", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, 1:], lambda a: a[::-1], lambda a: a[:1].repeat(3, 0)]
    )
    def test_views_are_written_right(self, tmp_path: Path, view):
        array = view(np.arange(15, dtype=np.float32).reshape(3, 5).astype(ml_dtypes.bfloat16))
        path = write(tmp_path / "x.safetensors", {"a": array})
        assert SafetensorsFile.open(path).read("a").tolist() == array.tolist()

    def test_any_order_gives_the_same_file(self, tmp_path: Path):
        tensors = example_tensors()
        first = write(tmp_path / "1.safetensors", tensors)
        plan = {name: (array.dtype, array.shape) for name, array in tensors.items()}
        with SafetensorsWriter(tmp_path / "2.safetensors", plan) as writer:
            for name in reversed(tensors):
                writer.write(name, tensors[name])
        assert (tmp_path / "2.safetensors").read_bytes() == first.read_bytes()

    def test_appears_whole_or_not_at_all(self, tmp_path: Path):
        path = write(tmp_path / "x.safetensors", {"old": np.zeros(2)})
        before = path.read_bytes()
        with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, {"new": (np.float32, (2,))}) as writer:
            writer.write("new", np.ones(2, np.float32))
            assert path.read_bytes() == before
            raise KeyboardInterrupt
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        "writes, expected",
        [
            ([], "1 planned tensors were never written: 'a'"),
            ([("a", np.ones((2, 3), np.float32))] * 2, "tensor 'a' was written before"),
            ([("b", np.ones(1, np.float32))], "tensor 'b' is not in the plan"),
            ([("a", np.ones((3, 2), np.float32))], r"tensor 'a' is float32\[3, 2\], but the plan says float32\[2, 3\]"),
            ([("a", np.ones((2, 3)))], "tensor 'a' is float64"),
            ([("a", np.ones((2, 3), ">f4"))], "tensor 'a' is >f4"),
        ],
    )
    def test_what_differs_from_the_plan_is_refused(self, tmp_path: Path, writes, expected: str):
        path = tmp_path / "x.safetensors"
        with pytest.raises(LaneformerError, match=f"x.safetensors: {expected}"):
            with SafetensorsWriter(path, {"a": (np.float32, (2, 3))}) as writer:
                for name, array in writes:
                    writer.write(name, array)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "plan, metadata, expected",
        [
            ({"a": (np.complex128, (1,))}, {}, "of complex128 has no place"),
            ({"__metadata__": (np.float32, (1,))}, {}, "has no place"),
            ({"a": (np.float32, (-1,))}, {}, "impossible shape"),
            ({"a": (np.float32, (2**62, 4))}, {}, "absurd shape"),
            ({"\ud800": (np.float32, (1,))}, {}, "not valid text"),
            ({}, {"a": 1}, "must map strings to strings"),
        ],
    )
    def test_plans_that_the_format_lacks(self, tmp_path: Path, plan, metadata, expected: str):
        with pytest.raises(LaneformerError, match=expected):
            SafetensorsWriter(tmp_path / "x.safetensors", plan, metadata)
        assert list(tmp_path.iterdir()) == []

    def test_full_disk_and_missing_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(LaneformerError, match="x.safetensors: No such file or directory"):
            SafetensorsWriter(tmp_path / "none" / "x.safetensors", {})

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(LaneformerError, match="x.safetensors: No space left on device"):
            SafetensorsWriter(tmp_path / "x.safetensors", {})
        assert list(tmp_path.iterdir()) == []

    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
        array = np.arange(100.0)
        assert_same_bits(SafetensorsFile.open(write(tmp_path / "x.safetensors", {"a": array})).read("a"), array)
