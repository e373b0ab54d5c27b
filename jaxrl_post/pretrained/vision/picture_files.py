"""The files of a model directory that say how pictures are resized and cut."""

import json
import shutil
from pathlib import Path

from jaxrl_post.models.vision_config import VisionInputs
from jaxrl_post.pictures import Eyes, PictureError, PictureProcessor
from jaxrl_post.pretrained.errors import CheckpointError

__all__ = ["eyes_of", "write_processor"]

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
# As a model's own files have them; the last is for moving pictures.
FILES = (PREPROCESSOR, PROCESSOR, "video_preprocessor_config.json")


def eyes_of(vision: VisionInputs, directory: Path | None) -> Eyes:
    """Reads how pictures become tokens of a model.

    Args:
        vision: of the model's config.
        directory: of the model; None for a preset, whose pictures may be as small as
            one block of patches.

    Raises:
        CheckpointError: the directory has no file of a picture processor, or one of
            another tower.
    """
    tower = vision.tower
    if directory is None:
        block = tower.patch_size * tower.merge_size
        return Eyes(
            PictureProcessor(
                patch_size=tower.patch_size,
                merge_size=tower.merge_size,
                temporal_patch_size=tower.temporal_patch_size,
                min_pixels=block**2,
            ),
            vision.image_token,
        )
    file = next((directory / n for n in FILES[:2] if (directory / n).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{directory}: has neither {PREPROCESSOR} nor {PROCESSOR}, which say how "
            "pictures are resized; copy them from the model's repository"
        )
    try:
        processor = PictureProcessor.from_file(file)
    except PictureError as error:
        raise CheckpointError(str(error)) from error
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        wanted, found = getattr(tower, name), getattr(processor, name)
        if wanted != found:
            raise CheckpointError(
                f"{file}: {name} must be {wanted}, as in config.json; got {found}; "
                "copy both files from the same model"
            )
    return Eyes(processor, vision.image_token)


def write_processor(directory: Path, vision: VisionInputs, source: Path | None) -> None:
    """Writes the files that `eyes_of` reads.

    Args:
        directory: of the model that is saved.
        vision: of its config.
        source: directory of the model from which it comes, whose files are copied; None
            writes the processor of a preset.
    """
    copied = [name for name in FILES if source and (source / name).is_file()]
    for name in copied:
        assert source is not None
        shutil.copyfile(source / name, directory / name)
    if not copied:
        text = json.dumps(eyes_of(vision, None).processor.to_json(), indent=2)
        (directory / PREPROCESSOR).write_text(text + "\n", encoding="utf-8")
