"""Parts of the ledger: bulk entry, gaps, renamed prefixes, padding, contradicting configurations."""
