"""The page: its routes and static files."""

from longspan.serving.page.routes import STATIC, router

__all__ = ["STATIC", "router"]
