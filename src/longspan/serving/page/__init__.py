"""The page: its routes and static files."""

from pathlib import Path

from fastapi import APIRouter

STATIC = Path(__file__).parent / "static"
router = APIRouter()
