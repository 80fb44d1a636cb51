"""The long document of the demo and the questions about it: documentation that ships with every Python."""

from __future__ import annotations

from pydoc_data import topics

DOCUMENT_TOPICS = ("with", "class", "global", "for")
QUESTIONS = (
    "\n\nQuestion: What does the with statement do?\nAnswer: The with statement",
    "\n\nQuestion: How is a class defined?\nAnswer: A class definition",
)


def long_document() -> str:
    """Several chapters of the language reference, more than 2,000 tokens of the demo's tokenizer."""
    return "\n\n".join(topics.topics[name].strip() for name in DOCUMENT_TOPICS)


def prompts() -> tuple[str, str]:
    """The document with question 1, and with question 2."""
    document = long_document()
    return document + QUESTIONS[0], document + QUESTIONS[1]
