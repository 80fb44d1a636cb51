"""The long document of the demo and the questions about it: documentation that ships with every
Python.
"""

from __future__ import annotations

from pydoc_data import topics

DOCUMENT_TOPIC = "import"
"""A chapter of the language reference that the demo's model has not been trained on; nearly
3,000 of its tokens.
"""
QUESTIONS = (
    "\n\nQuestion: What is the import statement?\nAnswer: The import statement",
    "\n\nQuestion: What is a future statement?\nAnswer: A future statement",
)


def long_document() -> str:
    """More than 2,000 tokens of the demo's tokenizer."""
    return topics.topics[DOCUMENT_TOPIC].strip()


def prompts() -> tuple[str, str]:
    """The document with question 1, and with question 2."""
    document = long_document()
    return document + QUESTIONS[0], document + QUESTIONS[1]
