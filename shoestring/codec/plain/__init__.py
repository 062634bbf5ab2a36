"""Plain codecs: the formats everyone knows, as the yardsticks for the cosine codec."""
