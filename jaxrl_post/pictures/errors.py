"""The error about pictures, and the rule on their sides that all parts share."""

__all__ = ["MOST_ASPECT", "PictureError", "check_sides"]

# The longer side divided by the shorter one must be smaller. Qwen's processors refuse
# longer strips: after the resize a strip would have one row of patches.
MOST_ASPECT = 200


class PictureError(ValueError):
    """A picture, or the description of a picture processor, cannot be used."""


def check_sides(height: int, width: int, name: str) -> None:
    """Refuses a picture without pixels, and one that is too long for its width.

    Args:
        height: in pixels.
        width: in pixels.
        name: the picture's name, for the message.

    Raises:
        PictureError: a side is smaller than 1, or one side is at least 200 times the
            other.

    >>> check_sides(3, 599, "strip.png")
    >>> check_sides(3, 600, "strip.png")
    Traceback (most recent call last):
    ...
    jaxrl_post.pictures.errors.PictureError: strip.png: the longer side must be less
    than 200 times the shorter one; got 600 x 3 pixels; crop it or cut it into several
    pictures
    """
    if min(height, width) < 1:
        raise PictureError(
            f"{name}: a picture must have pixels; got {width} x {height}; leave it out"
        )
    if max(height, width) >= MOST_ASPECT * min(height, width):
        raise PictureError(
            f"{name}: the longer side must be less than {MOST_ASPECT} times the "
            f"shorter one; got {width} x {height} pixels; crop it or cut it into "
            "several pictures"
        )
