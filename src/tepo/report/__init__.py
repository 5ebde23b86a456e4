"""What a person looks at: the report of a run, the token inspector, comparisons, a diagnosis. Reads run folders."""
