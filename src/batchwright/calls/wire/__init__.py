"""One try of one call: HTTP, the OpenAI and Ollama protocols, models in this process."""
