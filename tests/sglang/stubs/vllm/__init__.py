"""In vLLM's place: SGLang imports some of its operators on a processor, and never calls them."""
