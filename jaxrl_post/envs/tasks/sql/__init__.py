"""Questions over SQLite data bases, judged by what the query returns."""

from jaxrl_post.envs.tasks.sql.environment import Text2SQL

__all__ = ["Text2SQL"]
