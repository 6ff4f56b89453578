"""The streaming runtime: stock llama.cpp, with the experts read as they are chosen."""

from labkit.runtime.budget import BudgetWarning
from labkit.runtime.session import Session
from labkit.runtime.steps import Generation, TokenStep

__all__ = ["BudgetWarning", "Generation", "Session", "TokenStep"]
