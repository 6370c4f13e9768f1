"""What the ledger enters and says: kinds at once, gaps, prefixes, padding, contradictions between configurations."""
