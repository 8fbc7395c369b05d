"""Tasks: known ones and any folder with train, dev and test as .jsonl or .csv."""

from longspan.transfer.tasks.known import KNOWN, KnownTask, list_tasks
from longspan.transfer.tasks.opened import TaskData, open_task
from longspan.transfer.tasks.packed import install
from longspan.transfer.tasks.task import Example, Kind, Task

__all__ = ["KNOWN", "Example", "Kind", "KnownTask", "Task", "TaskData", "install", "list_tasks", "open_task"]
