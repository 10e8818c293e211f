"""How engines lay drafters out: names, configurations, vocabularies; used by the formats."""
