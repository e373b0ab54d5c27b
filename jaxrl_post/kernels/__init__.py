"""Operations with more than one implementation, one folder each."""
