"""What goes over the wire: HTTP, the OpenAI and Ollama protocols, models in this process."""
