"""Data: reads examples, tokenises text and packs sequences into rows."""
