"""Models in Hugging Face layout: we read other people's, and ours become theirs."""
