"""Questions about pictures that are drawn here: shapes, colours and digits."""

from jaxrl_post.envs.tasks.pictures.questions import QUESTIONS, DrawnPictures

__all__ = ["QUESTIONS", "DrawnPictures"]
