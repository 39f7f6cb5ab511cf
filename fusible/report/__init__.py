"""How an `Explanation` is shown: as text and tables (`text`), as a graph (`mermaid`)."""
