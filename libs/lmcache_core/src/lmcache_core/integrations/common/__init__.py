"""What adapters to several serving engines need. Imports no engine."""
