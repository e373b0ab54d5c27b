"""Pictures are read from every kind of source, and bad ones are refused."""

import base64
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxrl_post.pictures import PictureError, PictureLimits, picture_size, read_picture
from tests.pictures.files import colours, encoded, frames, png

PICTURE = colours()
FILE = encoded(PICTURE)
DATA = base64.b64encode(FILE).decode()


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a b.png").write_bytes(FILE)
    (tmp_path / "secret.png").write_bytes(FILE)
    return folder


@pytest.mark.parametrize(
    "source",
    [
        FILE,
        f"data:image/png;base64,{DATA}",
        f"DATA:image/png;charset=x;BASE64,{DATA}",
        f"data:;base64,{DATA.rstrip('=')}",
        f"data:image/png;base64,{DATA[:40]}\r\n {DATA[40:]}",
        "data:image/png;base64," + DATA.replace("+", "%2B").replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in FILE),
        "deep/a b.png",
        "./deep/../deep/a b.png",
        "inside.png",
    ],
    ids=str,
)
def test_every_source_gives_the_same_pixels(source, root):
    (root / "inside.png").symlink_to("deep/a b.png")
    found = read_picture(source, root)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert np.array_equal(found, PICTURE)
    assert picture_size(source, root) == (6, 9)


def test_the_folder_itself_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert np.array_equal(read_picture("deep/a b.png", tmp_path / "link"), PICTURE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/etc/passwd", "must be a path relative to .* got an absolute one"),
        ("C:\\pictures\\a.png", "got an absolute one"),
        ("\\\\server\\a.png", "got an absolute one"),
        ("../secret.png", "leads out of the folder .* move the file into"),
        ("deep/../../secret.png", "leads out of the folder"),
        ("out.png", "leads out of the folder .*secret.png"),
        ("away/secret.png", "leads out of the folder"),
        ("loop.png", "cannot be found below"),
        ("none.png", r"'none.png': cannot be found below .*\(No such file"),
        ("deep", "is no file; give the path of a file"),
        ("pipe.png", "is no file"),
        ("", "is no path"),
        ("a\0.png", "is no path"),
        ("a" * 5000, "cannot be found"),
    ],
)
def test_paths_out_of_the_folder_are_refused(source, message, root, tmp_path):
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "away").symlink_to(tmp_path)
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "pipe.png")
    with pytest.raises(PictureError, match=message):
        read_picture(source, root)


def test_a_path_needs_a_folder(tmp_path):
    with pytest.raises(PictureError, match=r"'a.png': a path needs a folder"):
        read_picture("a.png")
    with pytest.raises(PictureError, match="cannot be found below"):
        read_picture("a.png", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "address",
    ["http://localhost/a.png", "HTTPS://x.org/a.png", "file:///a.png", "s3://b/a.png"],
)
def test_addresses_are_never_fetched(address, root):
    with pytest.raises(PictureError, match=r"never fetched.* download it first"):
        read_picture(address, root)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:image/png;base64," + DATA[:-10] + "!" + DATA[-10:], "base64 is damaged"),
        ("data:image/png;base64,A", "base64 is damaged"),
        ("data:image/png;base64,é", "base64 is damaged"),
        ("data:image/png;base64", "must have a comma"),
        ("data:image/png;base64,", "is no picture in a format of BMP"),
    ],
)
def test_damaged_data_urls_are_refused(source, message):
    with pytest.raises(PictureError, match=message):
        read_picture(source)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_truncated_files_are_refused(kind):
    whole = encoded(colours(40, 50), kind)
    assert read_picture(whole).shape == (40, 50, 3)
    for size in (len(whole) // 2, len(whole) * 3 // 4):
        with pytest.raises(PictureError, match=r"truncated or damaged|is no picture"):
            read_picture(whole[:size])


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7"],
)
def test_other_files_are_refused(data):
    message = r"picture of \d+ bytes: is no picture .* begins with .* convert it to PNG"
    with pytest.raises(PictureError, match=message):
        read_picture(data)


def test_postscript_is_not_run():
    with pytest.raises(PictureError, match="is no picture"):
        read_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_frames_are_refused(kind):
    with pytest.raises(PictureError, match=f"must be one picture; got {kind} with 3"):
        read_picture(frames(kind))
    assert read_picture(frames(kind, 1)).shape == (6, 9, 3)


def test_a_photo_with_another_view_of_it_is_read():
    assert read_picture(frames("MPO", 2)).shape == (6, 9, 3)


@pytest.mark.parametrize("size", [(9000, 9000), (10_000, 10_000), (60_000, 60_000)])
def test_large_pictures_are_refused_before_they_are_decoded(size):
    """Their files have no pixels at all; Pillow has limits at 90 and 180 million."""
    bomb = png(*size, 8, 2, b"")
    with pytest.raises(
        PictureError, match=r"at most 67,108,864 pixels.*PictureLimits.pixels"
    ):
        read_picture(bomb)


def test_limits_count_bytes_and_pixels(root):
    limits = PictureLimits(bytes=len(FILE), pixels=54)
    sources = [FILE, f"data:image/png;base64,{DATA}", "deep/a b.png"]
    for source in sources:
        assert read_picture(source, root, limits).shape == (6, 9, 3)
        with pytest.raises(PictureError, match=r"at most 53 pixels; got 9 x 6"):
            read_picture(source, root, PictureLimits(pixels=53))
        fewer = PictureLimits(bytes=len(FILE) - 1)
        with pytest.raises(PictureError, match=f"must have at most {len(FILE) - 1} by"):
            read_picture(source, root, fewer)


def test_long_strips_are_refused():
    assert read_picture(encoded(colours(1, 199))).shape == (1, 199, 3)
    for shape in ((1, 200), (400, 2)):
        with pytest.raises(PictureError, match="less than 200 times the shorter one"):
            read_picture(encoded(colours(*shape)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF", "WEBP", "JPEG", "PPM"])
def test_a_picture_may_be_one_pixel(kind):
    assert read_picture(encoded(colours(1, 1), kind)).shape == (1, 1, 3)


def test_of_16_bits_the_high_byte_is_kept():
    values = np.array([[0, 255, 256, 40_000, 65_535]], np.uint16)
    wanted = (values >> 8).astype(np.uint8)[..., None].repeat(3, axis=2)
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(read_picture(encoded(values, kind)), wanted)
    big = b"\0" + values.astype(">u2").tobytes()
    assert np.array_equal(read_picture(png(5, 1, 16, 0, big)), wanted)
    # Pillow itself reads colours of 16 bits so.
    three = b"\0" + values.astype(">u2").repeat(3).tobytes()
    assert np.array_equal(read_picture(png(5, 1, 16, 2, three)), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_without_a_range_are_refused(dtype):
    with pytest.raises(PictureError, match="must have 8 or 16 bits a channel; got"):
        read_picture(encoded(np.ones((4, 5), dtype), "TIFF"))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_do_not_turn_a_picture():
    plain = encoded(PICTURE, "JPEG")
    damaged = encoded(PICTURE, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert np.array_equal(read_picture(damaged), read_picture(plain))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_sizes_are_those_of_the_upright_picture(kind, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    turned = encoded(PICTURE, kind, exif=exif)
    size = picture_size(turned)
    assert size == ((9, 6) if orientation in (5, 6, 7, 8) else (6, 9))
    assert size == read_picture(turned).shape[:2]


def test_a_size_needs_no_pixels():
    whole = encoded(colours(40, 50))
    assert picture_size(whole[:60]) == (40, 50)
    for bad in (
        b"hello",
        frames("GIF"),
        png(9000, 9000, 8, 2, b""),
        encoded(colours(1, 200)),
    ):
        with pytest.raises(PictureError):
            picture_size(bad)


def test_transparency_is_blended_with_white():
    seen = np.zeros((1, 3, 4), np.uint8)
    seen[0, :, 3] = [0, 128, 255]
    found = read_picture(encoded(seen))
    assert found[0, :, 0].tolist() == [255, 127, 0]


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"Pillow, .*\[pictures\]"):
        read_picture(FILE)


KINDS = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]
WHOLE = {kind: encoded(colours(8, 8), kind) for kind in KINDS} | {
    "palette": encoded(Image.fromarray(colours(8, 8)).quantize(4), "PNG"),
    "EXIF": encoded(colours(8, 8), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0"),
}


@given(
    st.sampled_from(sorted(WHOLE)),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    st.integers(0, 10**6),
)
@settings(max_examples=150)
def test_damaged_files_are_read_or_refused(kind, changes, end):
    data = bytearray(WHOLE[kind])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        found = read_picture(
            bytes(data[: end % len(data) + 1]), limits=PictureLimits(9999, 9999)
        )
    except PictureError:
        return
    assert found.dtype == np.uint8
    assert found.ndim == 3
    assert found.shape[2] == 3
