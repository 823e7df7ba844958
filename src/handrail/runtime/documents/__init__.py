"""Documents: the text of pages and other documents, extracted in a process with limits."""
